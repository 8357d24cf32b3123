"""What every entry point shares: running a flow, its ports in both colours, waiting, steps, bodies, answers."""
