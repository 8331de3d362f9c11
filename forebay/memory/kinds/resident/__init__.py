"""Resident copies of pages whose KV is in the host tier (HiSparse)."""
