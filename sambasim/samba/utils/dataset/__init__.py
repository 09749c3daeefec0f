"""`samba.utils.dataset`: see `mnist`."""
