"""Stand-ins for what tests and users of the package want to control: nothing of amusd itself uses them."""
