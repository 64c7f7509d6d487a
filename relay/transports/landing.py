"""Copies a body to its place and takes its checksum on the way, block by block, while each block is still in the cache.

Copying all and reading all again afterwards costs a quarter more time when several relays do it on one machine.
"""

import xxhash

BLOCK_BYTES = 512 * 1024
"""Half of a usual core's second-level cache."""


def land(body: memoryview, place: memoryview) -> str:
    """Copy a body to its place.

    Args:
        body: bytes that may change meanwhile.
        place: of the same length.

    Returns:
        The checksum of what lies in the place now, as `relay.manifest.checksum`.
    """
    digest = xxhash.xxh3_64()
    for start in range(0, len(place), BLOCK_BYTES):
        block = place[start : start + BLOCK_BYTES]
        block[:] = body[start : start + BLOCK_BYTES]
        digest.update(block)
    return digest.hexdigest()
