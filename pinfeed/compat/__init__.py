"""The documented APIs of earlier systems, as thin faces over pinfeed."""
