"""The depthwise causal convolution along tree paths, and the window that an accepted path leaves."""
