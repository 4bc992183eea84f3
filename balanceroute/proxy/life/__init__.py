"""The lifecycle of a request, in both orders (prefill first, decode first), and its stream to the client."""
