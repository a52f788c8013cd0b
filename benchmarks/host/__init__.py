"""Host work of pinfeed's loops on a GPU, measured with a simulated driver."""
