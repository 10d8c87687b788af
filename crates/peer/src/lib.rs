//! Who is at the other end of the hop: pinned keys, client identities, and the TLS that checks them.
