"""Draft trees out of a block drafter's marginals: built once per step on the device, without waiting for it."""
