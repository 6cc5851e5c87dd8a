"""Relaxed acceptance ahead of vLLM's own: drafts that the target finds likely enough are made certain."""
