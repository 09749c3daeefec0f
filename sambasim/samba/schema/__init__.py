"""`samba.schema`: see `snconfig`."""
