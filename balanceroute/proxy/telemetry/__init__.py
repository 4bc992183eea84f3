"""What the router says about itself: metrics, their instruments, logs."""
