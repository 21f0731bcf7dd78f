//! Why a statement failed, in words for the log. Never the statement nor anything that it wrote: of what the database
//! says, only what names a part of the schema is repeated.

use std::fmt::Write as _;

use sqlx::error::{DatabaseError, ErrorKind};

use super::Weight;

/// SQLITE_CONSTRAINT_TRIGGER: its words are the trigger's.
const BY_TRIGGER: &str = "1811";
/// undefined_table, insufficient_privilege
const NAMES_A_TABLE: [&str; 2] = ["42P01", "42501"];

pub(super) fn in_words(error: &sqlx::Error, weight: Weight) -> String {
    let Some(error) = error.as_database_error() else {
        return match weight {
            Weight::Lost => "the connection to the database was lost",
            Weight::Conflict
            | Weight::Locked
            | Weight::Unreached
            | Weight::Full
            | Weight::Constraint
            | Weight::Refused => "the driver could not run it",
        }
        .to_owned();
    };
    let mut words = meaning(error, weight).to_owned();
    if let Some(told) = schema_only(error) {
        let _ = write!(words, ": {told}");
    } else if let Some(name) = error.constraint() {
        let _ = write!(words, ": {name:?}");
        if let Some(table) = error.table() {
            let _ = write!(words, " of the table {table:?}");
        }
    }
    if let Some(code) = error.code() {
        let _ = write!(words, " (code {code})");
    }
    words
}

fn meaning(error: &dyn DatabaseError, weight: Weight) -> &'static str {
    #[allow(clippy::wildcard_enum_match_arm, reason = "the driver's enum is open")]
    match error.kind() {
        ErrorKind::UniqueViolation => "it would have written something twice that is to be unique",
        ErrorKind::ForeignKeyViolation => "what it refers to is not there, or is still referred to",
        ErrorKind::NotNullViolation => "a value is missing",
        ErrorKind::CheckViolation => "a value is none of those that are allowed",
        _ => match weight {
            Weight::Conflict => "it was in conflict with another transaction",
            Weight::Locked => "it waited too long for a lock",
            Weight::Lost => "the connection to the database was lost",
            Weight::Unreached => "another transaction holds the database",
            Weight::Full => "the database has no room",
            Weight::Constraint => "it broke a constraint",
            Weight::Refused => "the database refused it",
        },
    }
}

/// What the database says, if that can only be names of the schema.
fn schema_only(error: &dyn DatabaseError) -> Option<&str> {
    let (message, code) = (error.message(), error.code()?);
    let constraint = code.parse::<u32>().is_ok_and(|code| code & 0xff == 19);
    let table = message.starts_with("no such table: ") || NAMES_A_TABLE.contains(&&*code);
    // SQLSTATE has five characters, SQLite's numbers have fewer.
    match code.len() < 5 && constraint && code != BY_TRIGGER {
        true => Some(message),
        false => table.then_some(message),
    }
}
