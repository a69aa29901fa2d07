"""Many runs that differ in a few fields of the configuration."""
