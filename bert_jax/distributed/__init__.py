"""Devices and hosts: the mesh, fully sharded parameters, several processes."""
