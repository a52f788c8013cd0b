"""APIs of SpeedTorch, infinitybatch and pytorch-memory on top of pinfeed."""
