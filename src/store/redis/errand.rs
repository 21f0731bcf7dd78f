//! What a tool of operators is about to do, and which rights that takes.

/// What a tool of operators is about to do: see
/// [`RedisStoreBuilder::errands`](super::RedisStoreBuilder::errands).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Errand {
    /// [`Inspect::look`](crate::store::Inspect::look).
    Look,
    /// [`Inspect::list`](crate::store::Inspect::list) and [`find`](crate::store::Inspect::find).
    List,
    /// [`Inspect::audit`](crate::store::Inspect::audit).
    Audit,
    /// Settling a record, with its entry in the trail.
    Settle,
    /// Forgetting a record, with its entry in the trail.
    Forget,
    /// [`Inspect::trail`](crate::store::Inspect::trail).
    Trail,
}

impl Errand {
    /// True if it changes nothing in the store.
    pub(super) fn only_looks(self) -> bool {
        match self {
            Self::Look | Self::List | Self::Trail => true,
            Self::Audit | Self::Settle | Self::Forget => false,
        }
    }

    /// The commands that it takes beside those of connecting.
    pub(super) fn commands(self) -> &'static [&'static str] {
        match self {
            Self::Look => &["getrange", "pexpiretime", "strlen"],
            Self::List => &["getrange", "hgetall", "pexpiretime", "strlen", "zrange"],
            Self::Audit => &[
                "dbsize",
                "expire",
                "getrange",
                "hgetall",
                "hset",
                "pexpiretime",
                "scan",
                "strlen",
                "zadd",
                "zrange",
                "zremrangebyrank",
            ],
            Self::Settle => &["get", "getrange", "pexpiretime", "strlen", "xadd"],
            Self::Forget => &["del", "get", "getrange", "pexpiretime", "strlen", "xadd"],
            Self::Trail => &["xrevrange"],
        }
    }
}
