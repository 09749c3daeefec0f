"""What others have measured on devices, and the models that they measured: what predictions are held against."""
