"""The waist between processes: relays that hold requests and streams, and the brain that decides on them."""
