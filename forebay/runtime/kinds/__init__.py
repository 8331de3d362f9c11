"""The device's side of each kind of cache beside full KV, a module each, named as the kind is."""
