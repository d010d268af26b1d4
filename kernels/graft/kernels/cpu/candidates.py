"""Growth of candidates on the CPU: the reference has no loop over nodes, so it is the fast path."""

from graft.kernels.reference.candidates import organize_draft_results, select_top_k_tokens

__all__ = ["organize_draft_results", "select_top_k_tokens"]
