"""Hy3, of Hunyuan: q and k normed head by head, experts beside a shared one in all layers but the first."""
