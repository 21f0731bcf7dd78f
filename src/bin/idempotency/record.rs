//! A record, for people.

use tower_idempotency::StoredBody;
use tower_idempotency::admin::{RecordView, Shown, brief, rfc3339};
use tower_idempotency::record::Standing;

use crate::output::{Cell, Tone, cell, harmless, toned};

pub fn state_cell(state: &str, unknown: bool) -> Cell {
    toned(state, if unknown { Tone::Alarm } else { Tone::Plain })
}

/// A record in lines of a name and a value.
pub fn facts(shown: &Shown, view: &RecordView) -> Vec<Vec<Cell>> {
    let now = shown.now();
    let row = |name: &str, value: Cell| vec![toned(name, Tone::Faint), value];
    let mut rows = vec![
        row("reference", cell(&view.reference)),
        row("storage key", cell(&view.storage_key)),
        row("state", state_cell(view.summary, view.outcome_unknown)),
        row("version", cell(&view.version)),
    ];
    if let Some(record) = shown.record() {
        let seen = record.sighting();
        let ago = |at| format!("{} ({} ago)", rfc3339(at), brief(now.since(at)));
        rows.push(row("attempt", cell(seen.attempt.number().to_string())));
        rows.push(row("first claim", cell(ago(seen.created))));
        rows.push(row("since", cell(ago(seen.since(now)))));
        if seen.standing == Standing::Indeterminate {
            rows.push(row("unknown since", cell(ago(seen.at))));
        }
        if view.lease_until.is_some() {
            let until = match seen.at > now {
                true => format!("{} (in {})", rfc3339(seen.at), brief(seen.at.since(now))),
                false => ago(seen.at),
            };
            rows.push(row("lease until", cell(until)));
        }
    }
    if let Some(expires) = shown.expires() {
        let left = format!("{} (in {})", rfc3339(expires), brief(expires.since(now)));
        rows.push(row("kept until", cell(left)));
    }
    if let Some(status) = view.status {
        let body = match view.body_bytes {
            Some(bytes) => format!("{status}, {bytes} bytes of body"),
            None => format!("{status}, body not kept"),
        };
        rows.push(row("answer", cell(body)));
    }
    if let Some(bytes) = view.checkpoint_bytes {
        rows.push(row("checkpoint", cell(format!("{bytes} bytes"))));
    }
    if view.sealed {
        let hint = "sealed; give --protection-key";
        rows.push(row("contents", toned(hint, Tone::Alarm)));
    }
    rows
}

/// Headers and body of the stored answer.
pub fn contents_of(shown: &Shown) -> Result<String, String> {
    let response = shown.response().map_err(|error| error.to_string())?;
    let Some(response) = response else {
        return Ok("\n(no answer that can be shown)\n".to_owned());
    };
    let mut text = String::from("\n");
    for (name, value) in response.headers() {
        let value = String::from_utf8_lossy(value.as_bytes());
        text.push_str(&format!("{name}: {}\n", harmless(&value)));
    }
    if let StoredBody::Kept(body) = response.body() {
        let body = String::from_utf8_lossy(body);
        text.push('\n');
        for line in body.lines() {
            text.push_str(&harmless(line));
            text.push('\n');
        }
    }
    Ok(text)
}
