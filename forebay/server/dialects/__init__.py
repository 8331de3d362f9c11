"""How answers are spelled: a file for each of the APIs that clients speak."""
