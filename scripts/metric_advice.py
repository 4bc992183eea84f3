"""What each metric's labels are, and what to do when it moves: the part of docs/metrics.md that no code says."""

ADVICE: dict[str, tuple[str, str]] = {
    "admissions": ("worker, kind", "Uneven counts are normal: the policy levels tokens, not requests."),
    "admit_duration_seconds": (
        "",
        "Above a few ms at p99: lower `routing.r_max` (br_0, br_h), or choose a policy without a horizon.",
    ),
    "build": (
        "version, policy, hot_path, core",
        "`python`: installed without a compiler; `hot_path` a third more CPU per event, `core` half more per request.",
    ),
    "certificate_expiry_timestamp_seconds": (
        "setting",
        "Minus `time()`, the seconds left. Near 0: write new files at what the label names, such as `tls.cert_file`.",
    ),
    "decision_stage_seconds": ("stage", "Says which part of a decision takes the time of `admit_duration_seconds`."),
    "decode_active_requests": (
        "worker",
        "At `decode_slots` on all workers while requests wait: the cluster is full; add decoders.",
    ),
    "decode_envelope_tokens": (
        "",
        "Every step takes as long as this load needs. Compare it with the mean of `decode_load_tokens`.",
    ),
    "decode_foreign_requests": (
        "worker",
        "Above 0: something else sends to this decoder and takes its slots; find it.",
    ),
    "decode_foreign_tokens": ("worker", "As above, in KV tokens."),
    "decode_overlap_requests": (
        "worker",
        "m of `decode.overlap_requests`: at `auto` it rises with the time that KV transfers take.",
    ),
    "decode_imbalance_tokens": (
        "",
        "How uneven the loads are. Rising while slots are full: see the policy and `routing.max_wait_s`.",
    ),
    "decode_slots": (
        "worker",
        "Not the engine's `--max-num-seqs`: correct the setting ([why](tuning.md)). The sum of "
        "active requests divided by that of slots is the share in use.",
    ),
    "decode_load_tokens": ("worker", "Apart for minutes while slots are full: see [tuning](tuning.md)."),
    "degraded_workers": ("kind", "Above 0: read `reasons` of `GET /ready`."),
    "edge_refusals": (
        "reason",
        "Rising: a client that breaks HTTP, or an attack; `overload`: more connections or bytes at once than "
        "`limits` allow.",
    ),
    "generated_tokens": ("", "Its rate is tokens/s of the cluster."),
    "internal_errors": ("where", "Any: a bug of the router. Please report it with the traceback in the log."),
    "kv_drains": ("outcome", "Failures rise: prefill KV stays pinned until the engine's timeout; check the decoders."),
    "kv_orphans": ("", "Above 0 for long: prefillers hold KV nobody will pull; watch their KV usage."),
    "ledger_divergence": (
        "worker",
        "Not 0: the engine has requests that the router does not know: of direct clients, or leaked there.",
    ),
    "metaserver_callbacks": (
        "outcome",
        "Refused ones: a decoder calls back with a stale token, or somebody else does.",
    ),
    "moves": ("tier", "Rising: workers fall silent; see their health and `health.*`."),
    "given_up_requests": ("", "Any: a request killed engines. Its id is in the log; see what it asks for."),
    "predictor_error_tokens": (
        "",
        "Far above a tenth of the horizon: lengths have changed; the predictor refits by itself.",
    ),
    "predictor_failures": ("", "Any: the log says why; br_h counts those requests as staying."),
    "predictor_fit_age_seconds": (
        "",
        "Above `predictor.refit_interval_s` many times over while requests finish: refits fail.",
    ),
    "predictor_fits": ("outcome", "Failed ones: the log says why; the last good fit stays in use."),
    "predictor_gate": ("kind", "Mostly closed: br_h has nothing to go by and decides nearly as br_0."),
    "predictor_history_dropped": ("", "Any: the disk of `predictor.history` is full or slow."),
    "predictor_history_rows": ("", "Below some hundreds: forecasts are still coarse."),
    "predictor_keys": ("kind", "Mostly unknown: set `predictor.key_header`, or use survival."),
    "predictor_refreshes": ("", "For information."),
    "prefill_inflight_seconds": ("worker", "One far above the others: that prefiller is slower than the rest."),
    "prefill_kv_usage_ratio": ("worker", "Near `prefill.kv_usage_limit`: decoders do not keep up, or KV is orphaned."),
    "prefill_pinned_tokens": ("worker", "Grows with the pool: lower `pool.max_entries` if prefillers run out of KV."),
    "prefill_prompt_tokens": ("worker", "The prefix counters below divided by this are hit ratios."),
    "prefix_cache_tokens": ("worker", "The router's estimate, for information."),
    "prefix_hit_tokens": (
        "worker",
        "Its share of prompt tokens is what caches saved. See [prefix caching](prefix.md).",
    ),
    "prefix_predicted_tokens": ("worker", "Far above the hits: engines evict earlier than the router believes."),
    "process_cpu_seconds": (
        "process",
        "A rate near 1 is a whole core, all that a process can use: see [how many relays](relays.md#how-many).",
    ),
    "process_max_fds": ("process", "Below two for each client: raise `LimitNOFILE`, or `ulimit -n`."),
    "process_open_fds": ("process", "Near `process_max_fds`: the router accepts no more clients."),
    "process_resident_memory_bytes": (
        "process",
        "Rises and falls with streams and held bodies (`limits.max_held_bytes`). Rising for days: report it.",
    ),
    "process_start_time_seconds": (
        "process",
        "`changes()` counts restarts, also of the whole router (`router`, or `parent`).",
    ),
    "prompt_estimate_error_ratio": (
        "",
        "Wide: the model's chat template is not known yet; the router learns from answers.",
    ),
    "recomputes": (
        "kind",
        "Rising: decoders run out of KV blocks; lower `max_num_seqs` or add decoders. `pulled_late`: decoders, or "
        "the router, stand still for longer than prefillers keep KV (`prefill.kv_pin_s`).",
    ),
    "refusals": ("reason", "Rising: clients without a key or beyond their limits."),
    "request_duration_seconds": ("", "For information; see TTFT and TPOT first."),
    "request_tpot_seconds": ("", "Rises with `decode_envelope_tokens`: set fewer slots, or add decoders."),
    "request_ttft_seconds": (
        "",
        "Rises: see `wait_seconds`. Long waits of tier prefill: too few prefillers; of tier decode: too few slots.",
    ),
    "requests": ("outcome", "Failed or expired ones rise: see `upstream_errors_total` and the log."),
    "resumes": ("fidelity", "Rising: streams are cut off; see `moves_total` and `upstream_errors_total`."),
    "restarts": (
        "process",
        "Any that you did not cause: the log says how the process ended (`child died`), and has its last lines.",
    ),
    "retries": ("tier", "Rising: see `upstream_errors_total` for the worker."),
    "scrape_failures": ("worker", "Rising: that worker's `/metrics` cannot be read, so its KV usage is unknown."),
    "upstream_errors": ("worker, tier, kind", "One worker alone: look there. All of one tier: network or connector."),
    "wait_seconds": ("tier", "prefill: more prefillers; decode: more slots or decoders, or a lower `max_wait_s`."),
    "waiting_requests": ("phase", "Near `queue.max_queued`: clients are about to get 429."),
    "worker_state": ("worker, tier", "0: down; the log and `GET /state` say since when and why."),
    "workers_up": ("tier", "0: no request is served; `GET /ready` says why."),
}
"""By name without prefix and suffix: labels, and the advice."""
