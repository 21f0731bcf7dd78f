//! The Redis store.
#[derive(Debug)]
pub struct RedisStore;
