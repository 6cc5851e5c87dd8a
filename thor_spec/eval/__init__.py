"""Long-context evaluation: texts, requests, scores, and the controls without which they say nothing."""
