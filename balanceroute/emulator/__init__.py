"""Prefillers and decode ranks that speak vllm-ascend's HTTP over a modelled engine: a test instrument."""
