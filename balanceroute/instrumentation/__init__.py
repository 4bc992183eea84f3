"""What the engine itself says of its steps, for comparing with what the router believes (paper, appendix
"Engine-side instrumentation for evaluation").

An optional plugin for vLLM (`plugin.py`, entry point group `vllm.general_plugins`), off unless BALANCEROUTE_STEP_LOG
names a folder, writes one line per engine step and DP rank (`step_log.py`). `balanceroute steps FILE...` reads such
files: how far apart the ranks' loads are, and what a step costs per token and per request (`reading.py`, `text.py`).
Nothing here knows more of the package than its errors, and vLLM is imported only inside an engine that asked for it.
"""
