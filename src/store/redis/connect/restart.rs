//! Noticing that a server came back without what it had.
//!
//! A record that is lost makes its key new again, and nothing else shows it. So each new connection asks who
//! the server is, beside the calls: one that is another process than before and holds nothing, or may have
//! forgotten what it was told last, is worth a warning. A user without `+info` does without.

use std::sync::{Mutex, PoisonError};

use ::redis::Cmd;

/// The process at the other end, by its run id.
#[derive(Default)]
pub(super) struct Process(Mutex<Option<String>>);

impl Process {
    pub(super) fn question() -> Cmd {
        let mut question = Cmd::new();
        question.arg("INFO").arg("server").arg("persistence").arg("keyspace");
        question
    }

    /// Learns who it is now; gives what to warn of.
    pub(super) fn learn(&self, info: &str) -> Option<&'static str> {
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        let now = field("run_id")?.to_owned();
        // Nothing that can panic runs while it is locked.
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.replace(now.clone());
        if before.is_none_or(|before| before == now) {
            return None;
        }
        // The one before may have held nothing either: a replica that is promoted before there is any record, or
        // after the last one has expired. Nobody can tell any more.
        let holds_nothing = !info.lines().any(|line| line.starts_with("db"));
        if holds_nothing {
            return Some(
                "Redis is another process than before, and holds nothing: records that the one before may have had \
                 are lost, and their keys are new again",
            );
        }
        // Another server may have been there for long: a replica that was promoted.
        (field("aof_enabled") == Some("0")).then_some(
            "Redis is another process than before, without an append-only file: after a restart, \
             records since its last snapshot are lost, and their keys are new again",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(run_id: &str, aof: u8, keyspace: &str) -> String {
        format!("# Server\r\nrun_id:{run_id}\r\n# Persistence\r\naof_enabled:{aof}\r\n{keyspace}")
    }

    #[test]
    fn only_another_process_that_may_have_lost_something_is_worth_a_word() {
        let full = "# Keyspace\r\ndb0:keys=1,expires=1,avg_ttl=0\r\n";
        let process = Process::default();
        let warns = |info: &str| process.learn(info).is_some();
        assert!(!warns(&info("a", 0, "")), "the first");
        assert!(!warns(&info("a", 0, "")), "the same");
        let empty = process.learn(&info("b", 1, "")).expect("another one, and empty");
        assert!(empty.contains("holds nothing") && empty.contains("may have had"), "{empty}");
        assert!(!warns(&info("b", 1, "")), "said once");
        assert!(warns(&info("c", 0, full)), "a snapshot at best");
        assert!(!warns(&info("d", 1, full)), "it has read its append-only file");
        assert!(!warns("-NOPERM"));
    }
}
