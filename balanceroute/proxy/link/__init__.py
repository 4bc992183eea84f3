"""The link between relays, which hold requests, and the brain, which decides on them: the calls of
`admission/decider.py`.
"""
