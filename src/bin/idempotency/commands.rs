//! The commands.

use std::fmt;
use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use http::{HeaderName, HeaderValue, StatusCode};
use serde_json::json;
use tower_idempotency::admin::{
    Auditor, By, Detail, LONGEST_BODY, ListingView, MadeView, Operator, OperatorError, RecordView,
    Settlement, Shown, TrailView, Version, Who, Why, brief, rfc3339, state_of,
};
use tower_idempotency::record::Standing;
use tower_idempotency::store::{Glance, Inspect, Page, Source, Survey, Wanted};
use tower_idempotency::{HeaderRules, StorageKey, StoredResponse};

use crate::downstream::Downstream;
use crate::flags::{Change, Command, Flags, Settle, Which, read_file};
use crate::output::{Paint, Tone, cell, harmless, print, print_json, table, toned};
use crate::progress::Progress;
use crate::record::{contents_of, facts, state_cell};
use crate::store::{chain, lacks_schema, protected};

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    Operator(OperatorError),
    Failed(String),
    Usage(String),
    /// There is no such record; says where it was looked for.
    Missing(String),
}

impl From<OperatorError> for Failure {
    fn from(error: OperatorError) -> Self {
        Self::Operator(error)
    }
}

impl From<String> for Failure {
    fn from(error: String) -> Self {
        Self::Failed(error)
    }
}

impl Failure {
    /// As `--help` says it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Missing(_) | Self::Operator(OperatorError::NotFound) => 3,
            Self::Operator(
                OperatorError::Changed
                | OperatorError::InFlight { .. }
                | OperatorError::NotUnknown(_)
                | OperatorError::Unreadable,
            ) => 4,
            Self::Usage(_) | Self::Operator(OperatorError::Answer(_) | OperatorError::NoPage) => 2,
            Self::Operator(_) | Self::Failed(_) => 1,
        }
    }

    pub fn to_json(&self) -> String {
        let code = match self {
            Self::Operator(error) => error.code(),
            Self::Failed(_) => "failed",
            Self::Missing(_) => OperatorError::NotFound.code(),
            Self::Usage(_) => "usage",
        };
        json!({ "error": { "code": code, "message": self.to_string() } }).to_string()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operator(error) => {
                f.write_str(&chain(error))?;
                match lacks_schema(error) {
                    true => f.write_str(
                        " (there is no such table or column here: is this the service's database? If it \
                         is, its schema is older than these tools: run migrate())",
                    ),
                    false => Ok(()),
                }
            }
            Self::Failed(message) | Self::Usage(message) | Self::Missing(message) => {
                f.write_str(message)
            }
        }
    }
}

/// The program, with its store open.
struct Desk {
    operator: Operator,
    store: Arc<dyn Inspect>,
    /// Where it looks, as people name it.
    place: String,
    json: bool,
    paint: Paint,
    downstream: Downstream,
}

/// Runs what the command line asks for.
pub async fn run(flags: &Flags) -> Result<(), Failure> {
    if let Some(which) = flags.command.which() {
        which.check().map_err(Failure::Usage)?;
    }
    let downstream = Downstream::of(flags)?;
    let (store, place) = match open(flags).await {
        Ok(opened) => opened,
        Err(failure) => return Err(downstream.without_record(failure, flags.json)),
    };
    let (json, paint) = (flags.json, Paint::of_output());
    let mut operator = Operator::new(Arc::clone(&store));
    if let Some(retention) = flags.command.retention() {
        operator = operator.retention(retention);
    }
    if let Command::Settle(Settle::Done { replace_unreadable: true, .. }) = &flags.command {
        operator = operator.replacing_unreadable();
    }
    if let Command::Settle(Settle::Done { no_seal_check: true, .. }) = &flags.command {
        operator = operator.without_seal_check();
    }
    let desk = Desk { operator, store, place, json, paint, downstream };
    match &flags.command {
        Command::Show { which, contents, .. } => desk.show(which, *contents).await,
        Command::List { in_flight_older_than, limit, page, .. } => {
            let survey = in_flight_older_than.map_or(Survey::Unknown, Survey::InFlightFor);
            desk.list(survey, *limit, page.as_deref()).await
        }
        Command::Settle(settle) => desk.settle(settle).await,
        Command::Forget { which, change, unreadable, completed } => {
            desk.forget(which, change, *unreadable, *completed).await
        }
        Command::Audit { keys_per_second } => {
            let auditor = Auditor::new(Arc::clone(&desk.store));
            desk.audit(&auditor.keys_per_second(*keys_per_second)).await
        }
        Command::Trail { limit } => desk.trail(*limit).await,
    }
}

/// The store, and where it is, as people name it.
async fn open(flags: &Flags) -> Result<(Arc<dyn Inspect>, String), Failure> {
    let url = match &flags.store {
        None => return Err(Failure::Usage("--store, or IDEMPOTENCY_STORE, is missing".into())),
        Some(Err(error)) => return Err(Failure::Usage(format!("--store: {error}"))),
        Some(Ok(url)) => url,
    };
    let store = url.open(flags).await?;
    let store = protected(store, flags.command.protection_keys())?;
    let place = match url.has_prefix() {
        true => format!("{url}, prefix {:?}", flags.prefix),
        false => url.to_string(),
    };
    Ok((store, place))
}

impl Desk {
    async fn key(&self, which: &Which) -> Result<StorageKey, Failure> {
        if let Some(key) = which.storage_key().map_err(Failure::Usage)? {
            return Ok(key);
        }
        let Some(id) = which.reference else {
            return Err(Failure::Usage("no record is named".to_owned()));
        };
        match self.operator.find(id).await {
            Err(OperatorError::NotFound) if self.source().await? != Source::Direct => {
                eprintln!(
                    "note: in Redis a reference is known when an audit has seen it: run `idempotency \
                     audit`, or give account and key"
                );
                Err(OperatorError::NotFound.into())
            }
            found => Ok(found?),
        }
    }

    async fn source(&self) -> Result<Source, Failure> {
        let wanted = Wanted { survey: Survey::Unknown, at_most: 1, after: None };
        Ok(self.operator.list(&wanted).await?.source)
    }

    /// The record; if there is none, says where it was looked for.
    async fn look(&self, key: StorageKey, which: &Which) -> Result<Shown, Failure> {
        match self.operator.show(key).await {
            Err(OperatorError::NotFound) => {
                let (asked, place) = (which.in_words(), &self.place);
                let around = self.around(which).await;
                let error = OperatorError::NotFound;
                Err(Failure::Missing(format!("{error}: looked for {asked} in {place}{around}")))
            }
            shown => Ok(shown?),
        }
    }

    /// What may help who looked in the wrong place. Only words: whatever fails here is no failure of theirs.
    async fn around(&self, which: &Which) -> String {
        let mut hints = Vec::new();
        if let Some(key) = which.without_account()
            && self.operator.show(key).await.is_ok()
        {
            hints.push("there is a record of this key without an account: --global".to_owned());
        }
        if let Ok(Some(seen)) = self.store.glance().await {
            let Glance { records, more, elsewhere } = seen;
            hints.push(match (records, more) {
                (0, false) => "there are no records there at all".to_owned(),
                (1, false) => "there is 1 record there".to_owned(),
                (_, false) => format!("there are {records} records there"),
                (_, true) => format!("there are {records} records there and perhaps more"),
            });
            let elsewhere = elsewhere.iter().map(|place| harmless(place)).collect::<Vec<_>>();
            if !elsewhere.is_empty() {
                hints.push(format!("records are {} as well", elsewhere.join(", ")));
            }
            if records > 0 && which.key_is_given() {
                hints.push(
                    "is it another --account, in more or fewer parts, or an --endpoint as well?"
                        .to_owned(),
                );
            }
        }
        hints.iter().map(|hint| format!("; {hint}")).collect()
    }

    async fn elsewhere(&self) -> String {
        let Ok(Some(Glance { elsewhere, .. })) = self.store.glance().await else {
            return String::new();
        };
        let places: Vec<_> = elsewhere.iter().map(|place| harmless(place)).collect();
        match places.is_empty() {
            true => String::new(),
            false => format!("; records are {} as well", places.join(", ")),
        }
    }

    async fn show(&self, which: &Which, contents: bool) -> Result<(), Failure> {
        let shown = match self.look(self.key(which).await?, which).await {
            Ok(shown) => shown,
            Err(failure) => return Err(self.downstream.without_record(failure, self.json)),
        };
        let detail = if contents { Detail::Contents } else { Detail::Facts };
        let mut view = RecordView::of(&shown, detail);
        if self.json {
            view.downstream_keys = self.downstream.by_effect();
            return Ok(print_json(&view)?);
        }
        let mut rows = facts(&shown, &view);
        rows.extend(self.downstream.rows());
        print(&table(self.paint, &[], &rows))?;
        if contents {
            print(&contents_of(&shown)?)?;
        }
        Ok(())
    }

    async fn list(&self, survey: Survey, limit: u32, page: Option<&str>) -> Result<(), Failure> {
        let mut wanted = Wanted { survey, at_most: limit, after: page.map(Page::from_text) };
        let mut listing = self.operator.list(&wanted).await?;
        while let Some(more) = listing.more.clone() {
            let missing = limit - u32::try_from(listing.entries.len()).unwrap_or(limit);
            if missing == 0 {
                break;
            }
            (wanted.at_most, wanted.after) = (missing, Some(more));
            let next = self.operator.list(&wanted).await?;
            listing.entries.extend(next.entries);
            listing.more = next.more;
        }
        if listing.source == Source::NoIndex {
            return Err(Failure::Failed(
                "there is no index yet, so nothing can be listed: run `idempotency audit`, or let the \
                 service do it (admin::Auditor)"
                    .to_owned(),
            ));
        }
        if self.json {
            return Ok(print_json(&ListingView::of(&listing))?);
        }
        let now = listing.now;
        let rows = listing.entries.iter().map(|entry| {
            let seen = &entry.sighting;
            let since = seen.since(now);
            vec![
                cell(entry.key.log_id()),
                state_cell(state_of(seen, now), seen.is_unknown(now)),
                cell(seen.attempt.number().to_string()),
                cell(brief(now.since(since))),
                cell(rfc3339(since)),
                cell(entry.key.to_text()),
            ]
        });
        let rows: Vec<_> = rows.collect();
        let head = ["REFERENCE", "STATE", "ATTEMPT", "AGE", "SINCE", "STORAGE KEY"];
        if !rows.is_empty() {
            print(&table(self.paint, &head, &rows))?;
        }
        // Beside the table, so that a pipe gets nothing but rows.
        let count = match rows.len() {
            0 => "nothing".to_owned(),
            1 => "1 record".to_owned(),
            count => format!("{count} records"),
        };
        let fresh = match listing.source {
            Source::Index(pass) => format!(
                "; the index is {} old, what became overdue since may be missing{}",
                brief(now.since(pass.started)),
                match pass.left_out {
                    0 => String::new(),
                    left_out => format!(" (and the {left_out} newest have no place in it)"),
                }
            ),
            Source::Direct | Source::NoIndex => String::new(),
        };
        eprintln!("{count}{fresh}");
        if let Some(more) = &listing.more {
            eprintln!("there may be more: --page {}", more.as_text());
        }
        Ok(())
    }

    async fn settle(&self, settle: &Settle) -> Result<(), Failure> {
        let (which, change, settlement, words) = match settle {
            Settle::Done { which, status, header, body, body_file, change, .. } => {
                let body = match (body, body_file) {
                    (Some(text), _) => text.clone().into_bytes(),
                    (None, Some(file)) => {
                        no_two_inputs(which, file)?;
                        read_file(file, LONGEST_BODY).map_err(Failure::Usage)?
                    }
                    (None, None) => Vec::new(),
                };
                let length = body.len();
                let response = answer(*status, header, body)?;
                let words = format!(
                    "settle it as done: the next retry gets {status} and {length} bytes of body"
                );
                (which, change, Settlement::Done(response), words)
            }
            Settle::NotApplied { which, change, .. } => {
                let words =
                    "settle it as not applied: the next retry runs the operation".to_owned();
                (which, change, Settlement::NotApplied, words)
            }
        };
        let by = by(change)?;
        let key = self.key(which).await?;
        let version = self.agree(key, which, change, &words).await?;
        let made = self.operator.settle(key, version, settlement, by).await?;
        self.tell(key, &made, "settled")
    }

    async fn forget(
        &self,
        which: &Which,
        change: &Change,
        unreadable: bool,
        completed: bool,
    ) -> Result<(), Failure> {
        let by = by(change)?;
        let key = self.key(which).await?;
        let shown = self.look(key, which).await?;
        if !completed {
            refuse_completed(&shown, change)?;
        }
        let words = "forget it: its key is new, and the next retry runs the operation";
        let version = agree_on(&shown, change, words)?;
        if version == Version::UNREADABLE && !unreadable {
            eprintln!(
                "note: --unreadable forgets what this release cannot read; it may be a payment"
            );
            return Err(OperatorError::Unreadable.into());
        }
        let made = match self.operator.forget(key, version, by).await {
            Err(OperatorError::Unreadable) => {
                eprintln!(
                    "note: what stands under this key is no record of any release (in Redis: no string), and \
                     these tools leave it alone; remove it with the server's own"
                );
                return Err(OperatorError::Unreadable.into());
            }
            made => made?,
        };
        self.tell(key, &made, "forgotten")
    }

    /// The version that the change is for, after the person has seen what it is about.
    async fn agree(
        &self,
        key: StorageKey,
        which: &Which,
        change: &Change,
        words: &str,
    ) -> Result<Version, Failure> {
        if let (true, Some(version)) = (change.yes, change.if_version) {
            return Ok(version);
        }
        agree_on(&self.look(key, which).await?, change, words)
    }

    fn tell(
        &self,
        key: StorageKey,
        made: &tower_idempotency::admin::Made,
        done: &str,
    ) -> Result<(), Failure> {
        if !made.outcome_noted {
            eprintln!("warning: the trail could not be told that the change succeeded");
        }
        if self.json {
            return print_json(&MadeView::of(made)).map_err(|error| unsaid(&error));
        }
        let kept =
            made.kept_until.map_or(String::new(), |at| format!(", kept until {}", rfc3339(at)));
        let text = format!("{} is {done}{kept} (change {})\n", key.log_id(), made.change);
        print(&text).map_err(|error| unsaid(&error))
    }

    async fn audit(&self, auditor: &Auditor) -> Result<(), Failure> {
        let begun = Instant::now();
        let mut progress = Progress::new(begun);
        let step = auditor.pass(|step| progress.tell(step)).await;
        progress.end();
        let step = step.map_err(|error| Failure::Failed(chain(&error)))?;
        let seconds = begun.elapsed().as_secs_f64();
        let direct = self.source().await? == Source::Direct;
        if self.json {
            let kind = if direct { "direct" } else { "audit" };
            let (scanned, found, unknown) = (step.scanned, step.found, step.unknown);
            return Ok(print_json(&json!({
                "index": kind, "scanned": scanned, "found": found, "unknown": unknown,
                "in_flight": found.saturating_sub(unknown), "seconds": seconds,
            }))?);
        }
        Ok(print(&match direct {
            true => "this store has an index that is always right: nothing to do\n".to_owned(),
            // Perhaps not all is well, but it is looked for in the wrong place.
            false if step.scanned == 0 => {
                format!("no keys in {}{}\n", self.place, self.elsewhere().await)
            }
            false => format!(
                "{} {} read, {} of unknown outcome, {} in flight, in {}\n",
                step.scanned,
                if step.scanned == 1 { "key" } else { "keys" },
                step.unknown,
                step.found.saturating_sub(step.unknown),
                brief(begun.elapsed())
            ),
        })?)
    }

    async fn trail(&self, limit: u32) -> Result<(), Failure> {
        let trail = self.operator.trail(limit).await?;
        if self.json {
            let views: Vec<_> = trail.iter().map(TrailView::of).collect();
            return Ok(print_json(&views)?);
        }
        let rows = trail.iter().map(|entry| {
            let outcome = match entry.outcome.as_deref() {
                Some("done") => toned("done", Tone::Good),
                Some(other) => toned(other, Tone::Alarm),
                None => toned("never told", Tone::Alarm),
            };
            vec![
                cell(rfc3339(entry.at)),
                cell(&*entry.who),
                cell(&*entry.action),
                cell(entry.key.log_id()),
                outcome,
                cell(&*entry.why),
            ]
        });
        let rows: Vec<_> = rows.collect();
        match rows.is_empty() {
            true => eprintln!("nobody has changed anything"),
            false => {
                let head = ["AT", "WHO", "ACTION", "REFERENCE", "OUTCOME", "WHY"];
                print(&table(self.paint, &head, &rows))?;
            }
        }
        Ok(())
    }
}

/// The same of a record that was looked at.
fn agree_on(shown: &Shown, change: &Change, words: &str) -> Result<Version, Failure> {
    let version = change.if_version.unwrap_or_else(|| shown.version());
    if change.yes {
        return Ok(version);
    }
    if !(io::stdin().is_terminal() && io::stderr().is_terminal()) {
        return Err(Failure::Usage(
            "this changes a record, and nobody can be asked here: add --yes".to_owned(),
        ));
    }
    let view = RecordView::of(shown, Detail::Facts);
    eprint!("{}", table(Paint::Plain, &[], &facts(shown, &view)));
    eprint!("{words}.\nGo on? [y/N] ");
    let _ = io::stderr().flush();
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line);
    match read.is_ok() && ["y", "yes"].contains(&line.trim().to_lowercase().as_str()) {
        true => Ok(version),
        false => Err(Failure::Failed("nothing was changed".to_owned())),
    }
}

/// `--yes` is for one who cannot be asked, and says nothing of the record. Of another version than was given, the store
/// will say that it has changed.
fn refuse_completed(shown: &Shown, change: &Change) -> Result<(), Failure> {
    let standing = shown.record().map(|record| record.sighting().standing);
    let meant = change.if_version.is_none_or(|version| version == shown.version());
    match standing == Some(Standing::Completed) && meant {
        true => Err(Failure::Usage(
            "the record is completed: once it is forgotten, the next retry runs the operation again, and pays again. \
             Who wants that says --completed. Nothing was changed"
                .to_owned(),
        )),
        false => Ok(()),
    }
}

/// The change was made all the same.
fn unsaid(error: &str) -> Failure {
    Failure::Failed(format!("the change was made, but {error}"))
}

fn answer(
    status: u16,
    headers: &[(String, String)],
    body: Vec<u8>,
) -> Result<StoredResponse, Failure> {
    let usage = |what: &str| Failure::Usage(what.to_owned());
    let (mut head, ()) = http::Response::new(()).into_parts();
    head.status = StatusCode::from_u16(status).map_err(|_| usage("--status is none"))?;
    for (name, value) in headers {
        let name = HeaderName::try_from(name).map_err(|_| usage("a header's name is none"))?;
        let value = HeaderValue::try_from(value).map_err(|_| usage("a header's value is none"))?;
        head.headers.append(name, value);
    }
    let untyped = !body.is_empty() && !head.headers.contains_key(http::header::CONTENT_TYPE);
    if untyped && serde_json::from_slice::<serde::de::IgnoredAny>(&body).is_ok() {
        eprintln!("note: the body is JSON, so `content-type: application/json` is stored with it");
        let json = HeaderValue::from_static("application/json");
        head.headers.insert(http::header::CONTENT_TYPE, json);
    } else if untyped {
        eprintln!(
            "warning: there is no content-type for this body, so the client's replay has none: add \
             --header 'content-type: TYPE', as the handler would have sent it"
        );
    }
    Ok(StoredResponse::new(&head, body.into(), &HeaderRules::default()))
}

/// Standard input is read to its end by the first who asks.
fn no_two_inputs(which: &Which, body: &Path) -> Result<(), Failure> {
    match which.key_file.as_deref() == Some(body) && body.as_os_str() == "-" {
        true => Err(Failure::Usage("standard input is either the key or the body".to_owned())),
        false => Ok(()),
    }
}

fn by(change: &Change) -> Result<By, Failure> {
    let usage = |error: tower_idempotency::admin::ByError| Failure::Usage(error.to_string());
    let who = match &change.who {
        Some(who) => who.clone(),
        None => system_user().ok_or_else(|| {
            Failure::Usage("the system does not say who you are: give --who".to_owned())
        })?,
    };
    Ok(By { who: Who::new(&who).map_err(usage)?, why: Why::new(&change.why).map_err(usage)? })
}

/// The user of this process, as the system knows it; its environment may say anything.
fn system_user() -> Option<String> {
    let said = std::process::Command::new("id").arg("-un").output().ok()?;
    let name = String::from_utf8(said.stdout).ok()?.trim().to_owned();
    (said.status.success() && !name.is_empty()).then_some(name)
}
