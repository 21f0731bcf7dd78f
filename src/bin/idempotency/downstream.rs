//! `show --downstream`: the keys that the handler gives to its providers.

use std::collections::BTreeMap;

use serde_json::json;
use tower_idempotency::DownstreamSeed;

use crate::commands::Failure;
use crate::flags::{Command, Flags, Which};
use crate::output::{Cell, Paint, Tone, cell, print, print_json, table, toned};

/// Effects and their keys, in the order in which they were asked for.
#[derive(Debug, Default)]
pub struct Downstream(Vec<(String, String)>);

impl Downstream {
    /// What the command line asks for. Needs no store.
    pub fn of(flags: &Flags) -> Result<Self, Failure> {
        match &flags.command {
            Command::Show { which, downstream, .. } if !downstream.is_empty() => {
                let seed = seed(which).map_err(Failure::Usage)?;
                let key = |effect: &String| (effect.clone(), seed.key_for(effect));
                Ok(Self(downstream.iter().map(key).collect()))
            }
            Command::Show { .. }
            | Command::List { .. }
            | Command::Settle(_)
            | Command::Forget { .. }
            | Command::Audit { .. }
            | Command::Trail { .. } => Ok(Self::default()),
        }
    }

    /// In lines of a name and a value.
    pub fn rows(&self) -> impl Iterator<Item = Vec<Cell>> {
        self.0.iter().map(|(effect, key)| {
            vec![toned(format!("downstream {effect}"), Tone::Faint), cell(key)]
        })
    }

    /// By the names of the effects.
    pub fn by_effect(&self) -> BTreeMap<String, String> {
        self.0.iter().cloned().collect()
    }

    /// Tells the keys although no record can be shown with them, and gives the reason for that back.
    pub fn without_record(&self, reason: Failure, json: bool) -> Failure {
        if self.0.is_empty() || matches!(reason, Failure::Usage(_)) {
            return reason;
        }
        let told = match json {
            true => print_json(&json!({ "downstream_keys": self.by_effect() })),
            false => {
                eprintln!(
                    "note: no record confirms what these keys are made from: with another account, endpoint or key \
                     the provider was given others"
                );
                let rows: Vec<_> = self.rows().collect();
                print(&table(Paint::of_output(), &[], &rows))
            }
        };
        if let Err(error) = told {
            eprintln!("warning: {error}");
        }
        reason
    }
}

fn seed(which: &Which) -> Result<DownstreamSeed, String> {
    match which.scope_and_key()? {
        Some((identity, key)) => Ok(DownstreamSeed::new(&identity, key)),
        None => Err("--downstream needs the client's key and its scope, which cannot be told from --reference or \
                     --storage-key: give the key (or --key-file) with --account, once for each part of the scope, \
                     or with --global instead"
            .to_owned()),
    }
}
