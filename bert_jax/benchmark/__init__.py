"""How fast a config's train step is on the devices that are here."""
