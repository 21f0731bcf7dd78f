//! The address of a Redis, as people write it.

use std::fmt;
use std::str::FromStr;

use super::connect::{
    Address, AddressError, Certificates, find_slip, shown, take_wait, tls_is_possible_for,
};
use super::setup::SetupError;
use crate::error::StoreError;

/// Where Redis is: an address that [`RedisStore::connect`](super::RedisStore::connect) takes.
///
/// Made with [`str::parse`], so that a program can refuse one that makes no sense before it connects, and
/// shown without user, password and parameters.
///
/// ```
/// use tower_idempotency::store::redis::RedisAddress;
///
/// let address: RedisAddress = "redis://pay:secret@127.0.0.1:6379/2?wait=1".parse()?;
/// assert_eq!(address.to_string(), "redis://127.0.0.1:6379/2");
/// assert_eq!(address.wait(), Some(1));
/// # Ok::<_, tower_idempotency::StoreError>(())
/// ```
#[derive(Clone, Eq, PartialEq)]
pub struct RedisAddress {
    /// Without `wait`.
    url: Box<str>,
    wait: Option<u32>,
}

impl RedisAddress {
    /// How many replicas have to confirm a claim, a completion or a checkpoint, if the address says so:
    /// `?wait=2`.
    #[must_use]
    pub fn wait(&self) -> Option<u32> {
        self.wait
    }

    pub(super) fn read(url: &str) -> Result<Self, AddressError> {
        find_slip(url, cfg!(feature = "redis-tls"))?;
        let (url, wait) = take_wait(url)?;
        Address::parse(&url, None)?;
        Ok(Self { url: url.into(), wait })
    }

    /// What it leads to, by these certificates.
    pub(super) fn resolve(
        &self,
        certificates: Option<&Certificates>,
    ) -> Result<Address, AddressError> {
        tls_is_possible_for(&self.url)?;
        Address::parse(&self.url, certificates)
    }
}

impl FromStr for RedisAddress {
    type Err = StoreError;

    fn from_str(url: &str) -> Result<Self, StoreError> {
        Self::read(url).map_err(|error| SetupError::from(error).into_store_error("address"))
    }
}

/// Never the password.
impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shown(&self.url))
    }
}

impl fmt::Debug for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisAddress({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_never_shown_with_a_password() {
        for (url, shown) in [
            ("redis://u:s3cr@t@h:1/2", "redis://h:1/2"),
            ("redis+unix:///run/redis.sock?pass=s3cret", "redis+unix:///run/redis.sock"),
            (
                "redis+sentinel://:s3cret@a:1,b:2/m?wait=2&protocol=resp3",
                "redis+sentinel://a:1,b:2/m",
            ),
            ("rediss+cluster://u:s3cret@a:1,b", "rediss+cluster://a:1,b"),
        ] {
            let Ok(address) = url.parse::<RedisAddress>() else { panic!("{shown}") };
            assert_eq!(address.to_string(), shown);
            assert_eq!(format!("{address:?}"), format!("RedisAddress({shown})"));
        }
    }

    #[test]
    fn what_is_no_address_is_refused_before_anybody_connects() {
        for bad in
            ["", "redis", "redis:", "http://h", "redis://h?wait=many", "redis+sentinel://h:1"]
        {
            assert!(bad.parse::<RedisAddress>().is_err(), "{bad:?}");
        }
        let slip = "redis+claster://u:s3cret@h".parse::<RedisAddress>().unwrap_err();
        let told = slip.to_string();
        assert!(told.contains("redis+claster") && told.contains("redis+cluster"), "{told}");
        assert!(!told.contains("s3cret"), "{told}");
    }
}
