"""From order to parcel: an API, a relay, a broker and a consumer, killed at random. ``make parcels``."""
