"""What hardware must supply, and one folder for each that supplies it. Nothing outside this package names a vendor."""
