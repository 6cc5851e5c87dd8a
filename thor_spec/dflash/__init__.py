"""Block-diffusion drafting (DFlash, arXiv:2602.06036): what a drafter is, and when it fits a target."""
