//! Maps by what hashes to eight bytes of a digest: one multiplication instead of a hash of the hash.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

/// A map whose keys hash to a part of their digest.
pub(crate) type DigestMap<K, V> = HashMap<K, V, ByDigest>;

/// The seed of a map is its secret: who sends keys cannot choose any that fall together in a table.
#[derive(Clone, Debug)]
pub(crate) struct ByDigest {
    seed: u64,
}

impl Default for ByDigest {
    fn default() -> Self {
        Self { seed: RandomState::new().hash_one(0_u8) }
    }
}

impl BuildHasher for ByDigest {
    type Hasher = Product;

    fn build_hasher(&self) -> Product {
        Product(self.seed)
    }
}

/// Both halves of a product, folded into one.
pub(crate) struct Product(u64);

/// Odd and without a pattern: the fraction of the golden ratio.
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

impl Hasher for Product {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            let product = u128::from(self.0 ^ u64::from_le_bytes(word)) * u128::from(FACTOR);
            #[expect(clippy::cast_possible_truncation, reason = "the lower half is meant")]
            let low = product as u64;
            self.0 = low ^ u64::try_from(product >> 64).unwrap_or_default();
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn digests_that_differ_in_one_bit_are_spread_over_a_table_by_both_ends_of_the_hash() {
        let map = ByDigest::default();
        let hashes = (0..64).map(|bit| map.hash_one((1_u64 << bit).to_le_bytes()));
        let (mut low, mut high) = (BTreeSet::new(), BTreeSet::new());
        for hash in hashes {
            low.insert(hash & 0xFFF);
            high.insert(hash >> 52);
        }
        // A table takes its place from the low bits, and a mark from the high ones. Of 64 in 4,096 places about
        // one falls on another.
        assert!(low.len() > 48 && high.len() > 48, "{} and {}", low.len(), high.len());
    }

    #[test]
    fn what_falls_together_under_one_seed_does_not_under_another() {
        let (one, other) = (ByDigest::default(), ByDigest::default());
        let place = |map: &ByDigest, n: u64| map.hash_one(n.to_le_bytes()) & 0xFF;
        let together: Vec<_> = (0..20_000).filter(|&n| place(&one, n) == 7).collect();
        let places: BTreeSet<_> = together.iter().map(|&n| place(&other, n)).collect();
        assert!(together.len() > 20 && places.len() > 10, "{} {}", together.len(), places.len());
    }
}
