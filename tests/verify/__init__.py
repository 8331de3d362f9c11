"""Whether `forebay verify` proves what it says."""
