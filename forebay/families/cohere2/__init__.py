"""Command A and R7B: as Command R, but three layers of four have a window, and the fourth no rotary embedding."""
