"""Select masks by counting: everything that knows how a mask is found."""
