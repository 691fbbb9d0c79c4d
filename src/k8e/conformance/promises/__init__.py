"""The promises of all runtimes, by subject; importing a module adds its own."""
