"""The bytes: tables over the ids that memory hands out."""
