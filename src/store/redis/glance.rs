//! A short look around, for an operator who found nothing and may have looked in the wrong place.

use std::collections::BTreeSet;

use ::redis::{Cmd, Pipeline};

use super::RedisStore;
use super::check::text;
use super::inspect::scanned;
use crate::scope::StorageKey;
use crate::store::Glance;

/// How many steps of a pass it takes on each primary at most, and how many keys one step reads, about.
const STEPS: usize = 10;
const KEYS_A_STEP: usize = 1_000;

/// How many other places are told.
const PLACES: usize = 5;

impl RedisStore {
    /// `None` if the user may not look.
    pub(super) async fn look_around(&self) -> Option<Glance> {
        let (mut glance, mut others) = (Glance::default(), BTreeSet::new());
        for primary in self.0.connections.primaries() {
            let mut cursor = 0;
            for step in 0.. {
                let mut question = Pipeline::new();
                question
                    .cmd("SCAN")
                    .arg(cursor)
                    .arg("MATCH")
                    .arg(format!("*:{{{}}}", "?".repeat(32)));
                question.arg("COUNT").arg(KEYS_A_STEP).arg("TYPE").arg("string");
                let answers = self.0.connections.ask_one(&primary, &question).await.ok()?;
                let (next, names) = answers.into_iter().next().and_then(scanned)?;
                for prefix in names.iter().filter_map(|name| prefix_of(name)) {
                    match prefix == &*self.0.prefix {
                        true => glance.records += 1,
                        false => drop(others.insert(format!("under the prefix {prefix:?}"))),
                    }
                }
                cursor = next;
                if cursor == 0 {
                    break;
                }
                if step + 1 == STEPS {
                    glance.more = true;
                    break;
                }
            }
        }
        others.extend(self.other_databases().await);
        glance.elsewhere = others.into_iter().take(PLACES).map(Into::into).collect();
        Some(glance)
    }

    /// Those that have any keys; none if the user may not ask.
    async fn other_databases(&self) -> Vec<String> {
        if self.0.connections.are_a_cluster() {
            return Vec::new();
        }
        let mut question = Cmd::new();
        question.arg("INFO").arg("keyspace");
        let Some(Ok(said)) = self.0.connections.ask(&question).await.pop() else {
            return Vec::new();
        };
        let mut own = Pipeline::new();
        own.cmd("CLIENT").arg("INFO");
        let own = self.0.connections.ask_one("", &own).await.unwrap_or_default();
        let own = own.first().map(text).unwrap_or_default();
        let Some(own) = own.split_whitespace().find_map(|field| field.strip_prefix("db=")) else {
            return Vec::new();
        };
        let names = text(&said);
        let names = names.lines().filter_map(|line| line.strip_prefix("db")?.split_once(':'));
        let names = names.filter(|(name, _)| *name != own);
        names.map(|(name, _)| format!("(or other keys) in the database {name}")).collect()
    }
}

/// What a record's name begins with; none if it is the name of something else.
fn prefix_of(name: &[u8]) -> Option<&str> {
    let (prefix, key) = std::str::from_utf8(name).ok()?.rsplit_once(":{")?;
    StorageKey::from_text(key.strip_suffix('}')?).map(|_| prefix)
}
