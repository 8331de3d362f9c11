"""MiMo V2 Flash: scaled values narrower than keys, sinks and twice the KV heads in windows, experts in most layers."""
