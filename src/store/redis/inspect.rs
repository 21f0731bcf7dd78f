//! What operators need of Redis: looking, forgetting, an index of what nobody has settled, the trail.
//!
//! | key | |
//! |---|---|
//! | `idem:{operators}:pass` | a hash: the last complete pass, and which index is its |
//! | `idem:{operators}:overdue:<pass>` | a sorted set of storage keys, the oldest first |
//! | `idem:{operators}:trail` | a capped stream |
//!
//! A pass reads the headers of all records, with SCAN on one primary after another, and adds what is in flight
//! or unknown to an index of its own. When it is complete the hash names that index, in one command, and the
//! old one goes. The index holds keys only: a listing looks at each record as it stands now, so what was
//! settled since is never shown; what became overdue since is not found, and the listing says how old it is.

use std::time::{SystemTime, UNIX_EPOCH};

use ::redis::{Cmd, Pipeline, Value};
use bytes::Bytes;
use futures_util::future::join_all;
use tokio::time::Instant;

use super::call::Call;
use super::claim;
use super::connect::Urgency;
use super::script::{self, Looked};
use super::words::Words;
use super::{NAME, RedisStore, Verb};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::{
    self, Amend, Current, Forget, ForgetOutcome, HEADER_LENGTH, Millis, ResolveOutcome, Sighting,
    Standing, Unreadable,
};
use crate::scope::StorageKey;
use crate::store::inspect::{LOOKS_PER_PAGE, NoPage, TRAIL_LENGTH};
use crate::store::{
    AuditCursor, AuditStep, Contents, Entry, Glance, Inspect, Listing, LogId, Page, Pass, Sight,
    Source, StoreFuture, TrailEntry, Wanted,
};
use crate::token::HolderId;

/// The most keys in an index: a few megabytes. Who has more has another problem first.
const INDEX_LENGTH: u64 = 100_000;

/// How long an index without its pass stays: longer than two steps of a pass are apart.
const ASIDE_SECONDS: u64 = 3_600;

/// How long an index stays when nobody makes another one.
const INDEX_SECONDS: u64 = 7 * 24 * 3_600;

/// How long an index stays for those who page through it when another one has taken its place.
const REPLACED_SECONDS: u64 = 600;

/// How many records a listing looks at in one go, and how many at a time.
const LOOKS_AT_ONCE: usize = 200;
const LOOKS_SIDE_BY_SIDE: usize = 32;

/// Keys of an index that one command reads.
const FIND_STEP: usize = 10_000;

/// A pass on its way: `<pass>/<started>/<scanned>/<found>/<unknown>/<about>/<cursor of SCAN>/<primary>`.
struct Walk {
    pass: String,
    started: Millis,
    scanned: u64,
    found: u64,
    unknown: u64,
    about: u64,
    scan: u64,
    primary: String,
}

impl Walk {
    fn read(cursor: &AuditCursor) -> Option<Self> {
        let mut parts = cursor.as_text().splitn(8, '/');
        let pass = parts.next().filter(|pass| !pass.is_empty())?.to_owned();
        let mut number = || parts.next()?.parse::<u64>().ok();
        let (started, scanned, found) = (Millis(number()?), number()?, number()?);
        let (unknown, about, scan) = (number()?, number()?, number()?);
        let primary = parts.next()?.to_owned();
        Some(Self { pass, started, scanned, found, unknown, about, scan, primary })
    }

    fn cursor(&self) -> AuditCursor {
        let Self { pass, started, scanned, found, unknown, about, scan, primary } = self;
        let started = started.0;
        AuditCursor::from_text(format!(
            "{pass}/{started}/{scanned}/{found}/{unknown}/{about}/{scan}/{primary}"
        ))
    }
}

impl RedisStore {
    fn operators(&self, what: &str) -> String {
        format!("{}:{{operators}}:{what}", self.0.prefix)
    }

    fn index(&self, pass: &str) -> String {
        self.operators(&format!("overdue:{pass}"))
    }

    /// Runs a plain command on one of the keys above.
    async fn command(
        &self,
        operation: &'static str,
        build: impl FnOnce(&mut Cmd),
    ) -> Result<Value, StoreError> {
        let mut command = Cmd::new();
        build(&mut command);
        let (command, key) = Words::of(&command);
        let call = Call::plain(command, key);
        match self.0.connections.run(&call, Urgency::Ordinary, Instant::now()).await {
            Ok(answer) => Ok(answer.value),
            Err(failure) => Err(self.failed(operation, failure)),
        }
    }

    async fn look_at(
        &self,
        operation: &'static str,
        key: StorageKey,
        first: Option<usize>,
    ) -> Result<Looked, StoreError> {
        let call = script::look(&self.name(key), first);
        let verb = Verb::new(operation, Urgency::Ordinary, Looked::Foreign, script::looked);
        self.run(verb, &call, Instant::now()).await
    }

    async fn last_pass(&self, operation: &'static str) -> Result<Option<LastPass>, StoreError> {
        let key = self.operators("pass");
        let all = |cmd: &mut Cmd| {
            cmd.arg("HGETALL").arg(&key);
        };
        let value = self.command(operation, all).await?;
        Ok(LastPass::read(&fields(value)))
    }

    /// The keys of an index from one rank to another.
    async fn keys_of(
        &self,
        operation: &'static str,
        index: &str,
        from: usize,
        count: usize,
    ) -> Result<Vec<StorageKey>, StoreError> {
        let range = |cmd: &mut Cmd| {
            cmd.arg("ZRANGE").arg(index).arg(from).arg(from + count - 1);
        };
        let value = self.command(operation, range).await?;
        Ok(texts(value).into_iter().filter_map(|bytes| storage_key(&bytes)).collect())
    }

    /// The records of these keys as they stand now, in this order; without those that have gone.
    async fn entries(
        &self,
        keys: &[StorageKey],
    ) -> Result<(Vec<Option<Entry>>, Millis), StoreError> {
        // Judged by the servers' clocks, never by this machine's.
        let mut entries = Vec::with_capacity(keys.len());
        let mut latest = Millis(0);
        for some in keys.chunks(LOOKS_SIDE_BY_SIDE) {
            let looks = some.iter().map(|&key| self.look_at("list", key, Some(HEADER_LENGTH)));
            for (&key, looked) in some.iter().zip(join_all(looks).await) {
                entries.push(match looked? {
                    Looked::Found { now, expires, length, bytes } => {
                        latest = latest.max(now);
                        let bytes = record::written_out(bytes, expires);
                        let sighting = Sighting::read(&bytes, length).ok();
                        sighting.map(|sighting| Entry { key, sighting })
                    }
                    Looked::Absent { .. } | Looked::Foreign => None,
                });
            }
        }
        Ok((entries, latest))
    }

    /// The server's clock.
    async fn now(&self, operation: &'static str) -> Result<Millis, StoreError> {
        let nobody = StorageKey::from_bytes([0; 24]);
        Ok(match self.look_at(operation, nobody, Some(1)).await? {
            Looked::Found { now, .. } | Looked::Absent { now } => now,
            Looked::Foreign => clock(),
        })
    }

    async fn list_index(&self, wanted: &Wanted) -> Result<Listing, StoreError> {
        let now = self.now("list").await?;
        let nothing = |source| Listing { entries: Vec::new(), more: None, source, now };
        let Some(last) = self.last_pass("list").await? else {
            return Ok(nothing(Source::NoIndex));
        };
        let (mut rank, mut index) = (0, self.index(&last.index));
        if let Some(page) = &wanted.after {
            let place = page.as_text().split_once('.');
            let place = place.and_then(|(number, pass)| Some((number.parse().ok()?, pass)));
            let (number, pass) = place.ok_or_else(|| NoPage::of(NAME))?;
            rank = number;
            // Whoever pages goes on with the index that the first page was of, while it is there.
            let older = self.index(pass);
            if older != index {
                if self.keys_of("list", &older, 0, 1).await?.is_empty() {
                    return Err(NoPage::of(NAME));
                }
                index = older;
            }
        }
        let mut listing = nothing(Source::Index(last.pass));
        let at_most = wanted.at_most.max(1) as usize;
        let mut looked_at = 0;
        loop {
            let count = at_most.clamp(10, LOOKS_AT_ONCE).min(LOOKS_PER_PAGE - looked_at);
            let keys = self.keys_of("list", &index, rank, count).await?;
            let (entries, now) = self.entries(&keys).await?;
            listing.now = now.max(listing.now);
            let ends = keys.len() < count;
            for entry in entries {
                rank += 1;
                looked_at += 1;
                match entry {
                    Some(entry) if wanted.survey.takes(&entry.sighting, listing.now) => {
                        listing.entries.push(entry);
                    }
                    Some(_) | None => continue,
                }
                if listing.entries.len() == at_most {
                    break;
                }
            }
            let full = listing.entries.len() == at_most || looked_at >= LOOKS_PER_PAGE;
            if full || ends {
                let pass = index.rsplit(':').next().unwrap_or_default();
                let more = full && !self.keys_of("list", &index, rank, 1).await?.is_empty();
                listing.more = more.then(|| Page::from_text(&format!("{rank}.{pass}")));
                return Ok(listing);
            }
        }
    }

    async fn find_in_index(&self, id: LogId) -> Result<Vec<StorageKey>, StoreError> {
        let Some(last) = self.last_pass("find").await? else { return Ok(Vec::new()) };
        let index = self.index(&last.index);
        let (mut found, mut from) = (Vec::new(), 0);
        loop {
            let keys = self.keys_of("find", &index, from, FIND_STEP).await?;
            found.extend(keys.iter().copied().filter(|key| id.names(*key)));
            if keys.len() < FIND_STEP {
                return Ok(found);
            }
            from += FIND_STEP;
        }
    }

    async fn begin_pass(&self) -> Result<Walk, StoreError> {
        let mut about = 0;
        let mut started = clock();
        for primary in self.0.connections.primaries() {
            let mut questions = Pipeline::new();
            questions.cmd("DBSIZE").cmd("TIME");
            let mut answers = self.ask(&primary, &questions).await?.into_iter();
            about += answers.next().map_or(0, |value| integer(&value));
            // The earliest of their clocks: what was overdue then is found.
            if let Some(now) = answers.next().and_then(|value| claim::now(&value)) {
                started = started.min(now);
            }
        }
        let primary = self.0.connections.primaries().into_iter().next().unwrap_or_default();
        let id = HolderId::random();
        let pass = id.as_bytes()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Walk { pass, started, scanned: 0, found: 0, unknown: 0, about, scan: 0, primary })
    }

    async fn ask(&self, primary: &str, questions: &Pipeline) -> Result<Vec<Value>, StoreError> {
        let answers = self.0.connections.ask_one(primary, questions).await;
        answers.map_err(|failure| self.failed("audit", failure))
    }

    async fn walk_on(
        &self,
        cursor: Option<&AuditCursor>,
        at_most: u32,
    ) -> Result<AuditStep, StoreError> {
        let mut walk = match cursor {
            None => self.begin_pass().await?,
            Some(cursor) => Walk::read(cursor).ok_or_else(|| {
                StoreError::new(StoreErrorKind::Backend, NAME, "audit")
                    .with_source("this is no cursor of a pass")
            })?,
        };
        let mut questions = Pipeline::new();
        questions.cmd("SCAN").arg(walk.scan).arg("MATCH").arg(self.pattern());
        questions.arg("COUNT").arg(at_most.max(1)).arg("TYPE").arg("string");
        questions.cmd("TIME");
        let mut answers = self.ask(&walk.primary, &questions).await?.into_iter();
        let (scan, names) = answers.next().and_then(scanned).ok_or_else(|| {
            StoreError::new(StoreErrorKind::Backend, NAME, "audit")
                .with_source("the reply of SCAN cannot be read; does the user have +scan?")
        })?;
        let now = answers.next().and_then(|value| claim::now(&value)).unwrap_or_else(clock);
        self.add_overdue(&mut walk, &names, now).await?;
        walk.scanned += names.len() as u64;
        walk.scan = scan;
        if scan == 0 {
            // Names, not places in a list: nodes may come and go during a pass.
            let mut rest = self.0.connections.primaries().into_iter();
            match rest.find(|name| *name > walk.primary) {
                Some(next) => walk.primary = next,
                None => return self.end_pass(&walk, now).await,
            }
        }
        let Walk { scanned, found, unknown, about, .. } = walk;
        Ok(AuditStep { next: Some(walk.cursor()), scanned, found, unknown, about })
    }

    /// The names of records: never those of the keys above.
    fn pattern(&self) -> String {
        let special = |letter| matches!(letter, '*' | '?' | '[' | ']' | '\\' | '^');
        let mut pattern = String::new();
        for letter in self.0.prefix.chars() {
            if special(letter) {
                pattern.push('\\');
            }
            pattern.push(letter);
        }
        format!("{pattern}:{{{}}}", "?".repeat(32))
    }

    async fn add_overdue(
        &self,
        walk: &mut Walk,
        names: &[Vec<u8>],
        now: Millis,
    ) -> Result<(), StoreError> {
        if names.is_empty() {
            return Ok(());
        }
        let mut questions = Pipeline::new();
        for name in names {
            questions.cmd("GETRANGE").arg(name).arg(0).arg(HEADER_LENGTH - 1);
            questions.cmd("STRLEN").arg(name).cmd("PEXPIRETIME").arg(name);
        }
        let answers = self.ask(&walk.primary, &questions).await?;
        let (mut unknown, mut in_flight) = (Vec::new(), Vec::new());
        for (name, answer) in names.iter().zip(answers.chunks(3)) {
            // A key that has moved away, or has gone, is none of this node's.
            let [Value::BulkString(header), Value::Int(length), expires] = answer else { continue };
            let length = usize::try_from(*length).unwrap_or_default();
            let expires = Some(Millis(integer(expires))).filter(|expires| expires.0 > 0);
            let header = record::written_out(Bytes::copy_from_slice(header), expires);
            let Ok(sighting) = Sighting::read(&header, length) else { continue };
            let settled = matches!(sighting.standing, Standing::Open | Standing::Completed);
            if let (false, Some(key)) = (settled, key_of(name)) {
                let some = if sighting.is_unknown(now) { &mut unknown } else { &mut in_flight };
                some.push((sighting.since(now).0, key));
            }
        }
        if unknown.is_empty() && in_flight.is_empty() {
            return Ok(());
        }
        let index = self.index(&walk.pass);
        // Each by itself: of what SCAN told twice, the server says that it is not new.
        let new = self.add_to(&index, &unknown).await?;
        walk.unknown += new;
        walk.found += new + self.add_to(&index, &in_flight).await?;
        if walk.found > INDEX_LENGTH {
            let newest = |cmd: &mut Cmd| {
                cmd.arg("ZREMRANGEBYRANK").arg(&index).arg(INDEX_LENGTH).arg(-1);
            };
            self.command("audit", newest).await?;
        }
        self.expire(&index, ASIDE_SECONDS).await
    }

    /// Adds these to an index, and says how many are new in it.
    async fn add_to(&self, index: &str, some: &[(u64, StorageKey)]) -> Result<u64, StoreError> {
        if some.is_empty() {
            return Ok(0);
        }
        let add = |cmd: &mut Cmd| {
            cmd.arg("ZADD").arg(index);
            for (since, key) in some {
                cmd.arg(*since).arg(&key.as_bytes()[..]);
            }
        };
        Ok(integer(&self.command("audit", add).await?))
    }

    async fn expire(&self, key: &str, seconds: u64) -> Result<(), StoreError> {
        let expire = |cmd: &mut Cmd| {
            cmd.arg("EXPIRE").arg(key).arg(seconds);
        };
        self.command("audit", expire).await.map(drop)
    }

    /// Puts a complete index in the place of the last one.
    async fn end_pass(&self, walk: &Walk, now: Millis) -> Result<AuditStep, StoreError> {
        let before = self.last_pass("audit").await?;
        let index = self.index(&walk.pass);
        self.expire(&index, INDEX_SECONDS).await?;
        let pass = self.operators("pass");
        let left_out = walk.found.saturating_sub(INDEX_LENGTH);
        let swap = |cmd: &mut Cmd| {
            cmd.arg("HSET").arg(&pass).arg("index").arg(&walk.pass);
            cmd.arg("started").arg(walk.started.0).arg("ended").arg(now.0);
            cmd.arg("scanned").arg(walk.scanned).arg("found").arg(walk.found);
            cmd.arg("left_out").arg(left_out);
        };
        self.command("audit", swap).await?;
        self.expire(&pass, INDEX_SECONDS).await?;
        if let Some(before) = before.filter(|before| before.index != walk.pass) {
            self.expire(&self.index(&before.index), REPLACED_SECONDS).await?;
        }
        let Walk { scanned, found, unknown, about, .. } = *walk;
        Ok(AuditStep { next: None, scanned, found, unknown, about })
    }
}

/// What the hash says.
struct LastPass {
    pass: Pass,
    index: String,
}

impl LastPass {
    fn read(fields: &[(Vec<u8>, Vec<u8>)]) -> Option<Self> {
        let field = |name: &str| {
            let mut fields = fields.iter();
            let (_, value) = fields.find(|(field, _)| field == name.as_bytes())?;
            std::str::from_utf8(value).ok()
        };
        let number = |name| field(name)?.parse::<u64>().ok();
        let pass = Pass {
            started: Millis(number("started")?),
            ended: Millis(number("ended")?),
            scanned: number("scanned")?,
            found: number("found")?,
            left_out: number("left_out")?,
        };
        Some(Self { pass, index: field("index")?.to_owned() })
    }
}

/// This machine's clock, where the server's was not asked.
fn clock() -> Millis {
    Millis(0).after(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn integer(value: &Value) -> u64 {
    if let Value::Int(number) = value { u64::try_from(*number).unwrap_or_default() } else { 0 }
}

/// Strings of a reply.
fn texts(value: Value) -> Vec<Vec<u8>> {
    let text = |value| if let Value::BulkString(bytes) = value { Some(bytes) } else { None };
    let Value::Array(values) = value else { return Vec::new() };
    values.into_iter().filter_map(text).collect()
}

/// Fields and values of a hash, by either protocol.
#[allow(clippy::wildcard_enum_match_arm, reason = "there are two forms of a hash, and no third")]
fn fields(value: Value) -> Vec<(Vec<u8>, Vec<u8>)> {
    let flat = match value {
        Value::Map(pairs) => {
            Value::Array(pairs.into_iter().flat_map(|(name, value)| [name, value]).collect())
        }
        other => other,
    };
    let texts = texts(flat);
    texts.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()
}

/// The cursor and the names of SCAN.
pub(super) fn scanned(value: Value) -> Option<(u64, Vec<Vec<u8>>)> {
    let Value::Array(parts) = value else { return None };
    let [cursor, names] = <[Value; 2]>::try_from(parts).ok()?;
    let Value::BulkString(cursor) = cursor else { return None };
    Some((std::str::from_utf8(&cursor).ok()?.parse().ok()?, texts(names)))
}

fn storage_key(bytes: &[u8]) -> Option<StorageKey> {
    bytes.try_into().ok().map(StorageKey::from_bytes)
}

/// The storage key in the name of a record.
fn key_of(name: &[u8]) -> Option<StorageKey> {
    let name = std::str::from_utf8(name).ok()?;
    StorageKey::from_text(name.rsplit_once('{')?.1.strip_suffix('}')?)
}

/// An entry of the stream.
fn trail_entry(value: Value) -> Option<TrailEntry> {
    let Value::Array(parts) = value else { return None };
    let [_, values] = <[Value; 2]>::try_from(parts).ok()?;
    let fields = fields(values);
    let field = |name: &str| {
        let mut fields = fields.iter();
        fields.find(|(field, _)| field == name.as_bytes()).map(|(_, value)| value.as_slice())
    };
    let text = |name| -> Option<Box<str>> { Some(std::str::from_utf8(field(name)?).ok()?.into()) };
    Some(TrailEntry {
        id: field("id")?.try_into().ok()?,
        at: Millis(std::str::from_utf8(field("at")?).ok()?.parse().ok()?),
        who: text("who")?,
        why: text("why")?,
        action: text("action")?,
        key: storage_key(field("key")?)?,
        outcome: text("outcome").filter(|outcome| !outcome.is_empty()),
    })
}

impl Inspect for RedisStore {
    fn look(&self, key: StorageKey) -> StoreFuture<'_, Sight> {
        Box::pin(async move {
            let contents = Contents::Readable;
            Ok(match self.look_at("look", key, None).await? {
                Looked::Absent { now } => {
                    Sight { current: Current::Absent, contents, now, expires: None }
                }
                Looked::Found { now, expires, bytes, .. } => {
                    let bytes = record::written_out(bytes, expires);
                    Sight { current: Current::from_stored(Some(bytes)), contents, now, expires }
                }
                Looked::Foreign => {
                    let current = Current::Unreadable(Unreadable::Version);
                    Sight { current, contents, now: clock(), expires: None }
                }
            })
        })
    }

    /// What is no string is foreign, and is not forgotten either.
    fn forget<'a>(&'a self, key: StorageKey, forget: &'a Forget) -> StoreFuture<'a, ForgetOutcome> {
        Box::pin(async move {
            let call = script::forget(&self.name(key), forget).waiting(self.0.wait);
            let unreadable = ForgetOutcome::Unreadable;
            let verb = Verb::new("forget", Urgency::Ordinary, unreadable, script::forgotten)
                .holding_if(|outcome| *outcome == ForgetOutcome::Forgotten);
            self.run(verb, &call, Instant::now()).await
        })
    }

    fn amend<'a>(&'a self, key: StorageKey, amend: &'a Amend) -> StoreFuture<'a, ResolveOutcome> {
        Box::pin(async move {
            let call = script::amend(&self.name(key), amend).waiting(self.0.wait);
            let unreadable = ResolveOutcome::Unreadable;
            let verb = Verb::new("amend", Urgency::Ordinary, unreadable, script::amended)
                .holding_if(|outcome| *outcome == ResolveOutcome::Resolved);
            self.run(verb, &call, Instant::now()).await
        })
    }

    fn list<'a>(&'a self, wanted: &'a Wanted) -> StoreFuture<'a, Listing> {
        Box::pin(self.list_index(wanted))
    }

    fn find(&self, id: LogId) -> StoreFuture<'_, Vec<StorageKey>> {
        Box::pin(self.find_in_index(id))
    }

    fn glance(&self) -> StoreFuture<'_, Option<Glance>> {
        Box::pin(async { Ok(self.look_around().await) })
    }

    fn audit<'a>(
        &'a self,
        cursor: Option<&'a AuditCursor>,
        at_most: u32,
    ) -> StoreFuture<'a, AuditStep> {
        Box::pin(self.walk_on(cursor, at_most))
    }

    fn note<'a>(&'a self, entry: &'a TrailEntry) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let outcome = entry.outcome.as_deref().unwrap_or_default();
            let arguments: [&[u8]; 6] = [
                &entry.id,
                entry.key.as_bytes(),
                entry.action.as_bytes(),
                entry.who.as_bytes(),
                entry.why.as_bytes(),
                outcome.as_bytes(),
            ];
            // Two for each change: before and after it.
            let length = u64::from(TRAIL_LENGTH) * 2;
            let call = script::note(self.operators("trail").as_bytes(), arguments, length)
                .waiting(self.0.wait);
            // A key of another type cannot be written to, so nothing is noted.
            let verb =
                Verb::new("note", Urgency::Ordinary, Err(()), |reply| script::noted(reply).map(Ok))
                    .holding_if(|noted| *noted == Ok(()));
            self.run(verb, &call, Instant::now()).await?.map_err(|()| {
                StoreError::new(StoreErrorKind::Backend, NAME, "note")
                    .with_source("something else stands under the key of the trail")
            })
        })
    }

    fn trail(&self, at_most: u32) -> StoreFuture<'_, Vec<TrailEntry>> {
        Box::pin(async move {
            let key = self.operators("trail");
            let latest = |cmd: &mut Cmd| {
                cmd.arg("XREVRANGE").arg(&key).arg("+").arg("-");
                cmd.arg("COUNT").arg(u64::from(at_most) * 2);
            };
            let value = self.command("trail", latest).await?;
            let Value::Array(values) = value else { return Ok(Vec::new()) };
            let mut trail: Vec<TrailEntry> = Vec::new();
            for entry in values.into_iter().filter_map(trail_entry) {
                // What came of a change stands above its beginning.
                match trail.iter_mut().find(|known| known.id == entry.id) {
                    Some(known) => known.at = entry.at,
                    None => trail.push(entry),
                }
            }
            trail.truncate(at_most as usize);
            Ok(trail)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_survives_its_own_text() {
        let walk = Walk {
            pass: "0a".to_owned(),
            started: Millis(1),
            scanned: 2,
            found: 3,
            unknown: 1,
            about: 4,
            scan: u64::MAX,
            primary: "[::1]:7000".to_owned(),
        };
        let text = walk.cursor();
        assert_eq!(Walk::read(&text).map(|walk| walk.cursor()), Some(text));
        for bad in ["", "/1/2/3/4/5/6/", "a/1/2/3/4/5/6", "a/b/2/3/4/5/6/x"] {
            assert!(Walk::read(&AuditCursor::from_text(bad)).is_none(), "{bad}");
        }
    }

    #[test]
    fn the_key_is_read_out_of_a_name() {
        let key = StorageKey::from_bytes([9; 24]);
        let name = format!("idem:{{{}}}", key.to_text());
        assert_eq!(key_of(name.as_bytes()), Some(key));
        assert_eq!(key_of(b"idem:{operators}:trail"), None);
    }
}
