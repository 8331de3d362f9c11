"""The ops of every backend, defined in torch: each native op is compared with the definition here."""
