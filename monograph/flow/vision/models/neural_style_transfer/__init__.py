"""The network of fast style transfer, in `stylenet`."""
