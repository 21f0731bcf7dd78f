//! The history of a test: what clients asked and were told is noted here as it happens; what handlers did,
//! what the ledger has and what the store holds is gathered at the end.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tower_idempotency::record::{Current, Record, State as Recorded};
use tower_idempotency::store::Inspect;
use tower_idempotency::{IdempotencyKey, Identity, StorageKey, StoredBody, StoredResponse};

use crate::invariants::{Broken, Charge, End, Evidence, Finish, Held, Operation, Run, State};
use crate::sandbox::{Answer, Call, Connection, Sandbox};

/// How often requests ended in each way.
pub(crate) type Ends = BTreeMap<&'static str, usize>;

/// What all clients saw. Clones are the same history.
#[derive(Clone)]
pub(crate) struct History {
    inner: Arc<Mutex<Inner>>,
    lease: Duration,
}

#[derive(Default)]
struct Inner {
    operations: Vec<Operation>,
    /// Of processes that are gone.
    runs: Vec<Run>,
    sights: Vec<(String, Held)>,
    last_seen: BTreeMap<String, Held>,
    /// Keys whose clients are at it.
    busy: BTreeMap<String, usize>,
    /// By process, how many seconds its clock is ahead of the true time.
    ahead: BTreeMap<u32, i64>,
}

/// How long a client goes on asking: longer than any fault lasts.
const PATIENCE: Duration = Duration::from_secs(90);

impl End {
    pub(crate) fn of(answer: &Answer) -> Self {
        let json = serde_json::from_slice::<Value>(&answer.body).unwrap_or_default();
        let code = json["error"]["code"].as_str().unwrap_or_default();
        let (body, replay) = (answer.body.clone(), answer.is_replay());
        match (answer.status.as_u16(), code) {
            (201, _) => Self::Paid {
                request: (
                    json["amount"].as_u64().expect("an amount"),
                    json["source"].as_str().expect("a source").to_owned(),
                ),
                body,
                replay,
            },
            (409 | 500, "idempotency_outcome_unknown") => Self::Unknown,
            (409, "idempotency_result_unavailable") => Self::NotKept,
            (422, "idempotency_key_reused") => Self::Mismatch,
            (409, "idempotency_key_in_use" | "idempotency_too_many_waiting") => Self::InUse,
            (503, "unavailable") | (429, _) => Self::DidNothing,
            (503, "idempotency_store_unavailable" | "idempotency_record_unreadable") => {
                Self::ComeBack
            }
            (status, _) => Self::Answered { status, body, replay },
        }
    }
}

impl History {
    /// For servers with this lease.
    pub(crate) fn with_lease(lease: Duration) -> Self {
        Self { inner: Arc::default(), lease }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder panics")
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    /// Sends one payment and notes how it ended; no answer if it was lost.
    pub(crate) async fn ask(
        &self,
        to: SocketAddr,
        key: &str,
        source: &str,
        amount: u32,
    ) -> Option<Answer> {
        // Whatever becomes of this client: until there is an answer, it is lost.
        let number = self.lost(key, source, amount);
        let _busy = self.busy(key);
        let mut connection = Connection::open(to).await.ok()?;
        self.told(number, &mut connection, Call::pay_amount(key, source, amount)).await
    }

    /// The same on a connection that is open.
    pub(crate) async fn ask_on(
        &self,
        connection: &mut Connection,
        key: &str,
        source: &str,
        amount: u32,
    ) -> Option<Answer> {
        let number = self.lost(key, source, amount);
        let _busy = self.busy(key);
        self.told(number, connection, Call::pay_amount(key, source, amount)).await
    }

    /// Notes a payment that is asked for and of which its client never hears; gives its number.
    pub(crate) fn lost(&self, key: &str, source: &str, amount: u32) -> usize {
        let (key, request) = (key.to_owned(), (amount.into(), source.to_owned()));
        let mut inner = self.inner();
        inner.operations.push(Operation { key, request, end: End::Lost });
        inner.operations.len() - 1
    }

    async fn told(&self, number: usize, connection: &mut Connection, call: Call) -> Option<Answer> {
        let answer = connection.send(call).await.ok();
        if let Some(answer) = &answer {
            self.inner().operations[number].end = End::of(answer);
        }
        answer
    }

    pub(crate) async fn pay(&self, to: SocketAddr, key: &str, source: &str, amount: u32) -> End {
        let answer = self.ask(to, key, source, amount).await;
        answer.as_ref().map_or(End::Lost, End::of)
    }

    /// Goes on asking, now here and now there, until there is a final answer.
    pub(crate) async fn pay_surely(
        &self,
        to: &[SocketAddr],
        key: &str,
        source: &str,
        amount: u32,
    ) -> End {
        let began = Instant::now();
        for address in to.iter().cycle() {
            let end = self.pay(*address, key, source, amount).await;
            if end.is_final() {
                return end;
            }
            assert!(began.elapsed() < PATIENCE, "{key} ends with no answer: {end:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        unreachable!("a cycle does not end")
    }

    /// Says that a key is worth looking at, until what this gives is dropped.
    fn busy(&self, key: &str) -> Busy {
        *self.inner().busy.entry(key.to_owned()).or_default() += 1;
        Busy(self.clone(), key.to_owned())
    }

    /// Looks at what the store holds of all busy keys, again and again, until what this gives is dropped.
    pub(crate) fn watch(&self, store: Box<dyn Inspect>) -> Watch {
        let history = self.clone();
        Watch(tokio::spawn(async move {
            loop {
                history.look(&*store).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }))
    }

    /// How many keys clients wait for an answer to.
    pub(crate) fn in_flight(&self) -> usize {
        self.inner().busy.len()
    }

    /// Whether a client still waits for an answer to a key of which this is true.
    pub(crate) fn waits_for(&self, is_it: impl Fn(&str) -> bool) -> bool {
        self.inner().busy.keys().any(|key| is_it(key))
    }

    /// How often the store was seen to hold something else than before.
    pub(crate) fn sights(&self) -> usize {
        self.inner().sights.len()
    }

    async fn look(&self, store: &dyn Inspect) {
        let keys: Vec<_> = self.inner().busy.keys().cloned().collect();
        for key in keys {
            let Some(held) = held(store, &key).await else { continue };
            let mut inner = self.inner();
            if inner.last_seen.get(&key) != Some(&held) {
                inner.last_seen.insert(key.clone(), held.clone());
                inner.sights.push((key, held));
            }
        }
    }

    /// Keeps what a process said that its handlers did, before it is gone.
    pub(crate) fn keep_runs_of(&self, ended: &Sandbox) {
        let end = Instant::now() + Duration::from_secs(10);
        while !ended.has_hung_up() {
            assert!(Instant::now() < end, "what it said does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.inner().runs.extend(runs_in(&ended.said().1));
    }

    /// The same of a process that was killed, where its key may run again for that: its handlers were over when it was
    /// gone.
    pub(crate) fn keep_runs_of_killed(&self, ended: &Sandbox) {
        self.keep_runs_of(ended);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970");
        let now = u64::try_from(now.as_micros()).expect("not that late");
        for run in &mut self.inner().runs {
            run.ended.get_or_insert((now, Finish::CutOff));
        }
    }

    /// Says that the clock of a process is so many seconds ahead: what it tells of its handlers is by that.
    pub(crate) fn is_ahead(&self, server: &Sandbox, seconds: i64) {
        self.inner().ahead.insert(server.pid(), seconds);
    }

    pub(crate) fn ends(&self) -> Ends {
        let mut ends = Ends::new();
        for sent in &self.inner().operations {
            *ends.entry(sent.end.name()).or_default() += 1;
        }
        ends
    }

    /// Everything that is known: what these processes say, the ledger of the first, and the store.
    pub(crate) async fn evidence(&self, servers: &[&Sandbox], store: &dyn Inspect) -> Evidence {
        let ledger = servers[0].ledger().await;
        let charges: Vec<_> = ledger["entries"].as_array().expect("entries").iter().collect();
        let charges = charges.into_iter().filter(|entry| entry["action"] == "charge");
        let number = |entry: &Value, name: &str| entry[name].as_u64().expect("a number");
        let charges: Vec<_> = charges
            .map(|entry| Charge {
                key_id: entry["key_id"].as_str().expect("a key id").to_owned(),
                attempt: u32::try_from(number(entry, "attempt")).expect("few attempts"),
                amount: number(entry, "amount"),
            })
            .collect();
        let runs = self.runs_of(servers, &charges).await;
        self.evidence_of(charges, runs, store).await
    }

    /// The same of servers that are no processes, and say themselves what was charged and has run.
    pub(crate) async fn evidence_of(
        &self,
        charges: Vec<Charge>,
        ran: Vec<Run>,
        store: &dyn Inspect,
    ) -> Evidence {
        let (operations, mut runs, sights) = {
            let inner = self.inner();
            (inner.operations.clone(), inner.runs.clone(), inner.sights.clone())
        };
        runs.extend(ran);
        let keys: BTreeSet<_> = operations.iter().map(|sent| sent.key.clone()).collect();
        let mut at_the_end = BTreeMap::new();
        for key in keys {
            let held = held(store, &key).await.expect("the store answers again");
            at_the_end.insert(key, held);
        }
        Evidence { operations, runs, charges, sights, held: at_the_end, lease: self.lease }
    }

    /// What processes say that their handlers did. Of those that live, all have ended, and each charge has its own; but
    /// what they have said may be on its way.
    async fn runs_of(&self, servers: &[&Sandbox], charges: &[Charge]) -> Vec<Run> {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            let (mut runs, mut complete) = (Vec::new(), true);
            for server in servers {
                let hung_up = server.has_hung_up();
                let mut said = runs_in(&server.said().1);
                complete &= hung_up || said.iter().all(|run| run.ended.is_some());
                if let Some(&ahead) = self.inner().ahead.get(&server.pid()) {
                    said.iter_mut().for_each(|run| run.put_back(ahead));
                }
                runs.extend(said);
            }
            let kept = self.inner().runs.clone();
            let told = |charge: &Charge| {
                let of_it =
                    |run: &Run| run.key_id == charge.key_id && run.attempt == charge.attempt;
                runs.iter().chain(&kept).any(of_it)
            };
            complete &= charges.iter().all(told);
            if complete || Instant::now() > end {
                return runs;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Fails with everything that is broken.
#[track_caller]
pub(crate) fn assert_holds(broken: &[Broken]) {
    let lines: Vec<_> =
        broken.iter().map(|Broken { invariant, what }| format!("{invariant}: {what}")).collect();
    assert!(lines.is_empty(), "{} broken:\n{}", lines.len(), lines.join("\n"));
}

/// Fails unless exactly these are broken: what a fault takes away by nature, and no more.
#[track_caller]
pub(crate) fn assert_breaks(broken: &[Broken], expected: &[&str]) {
    let found: BTreeSet<_> = broken.iter().map(|broken| broken.invariant).collect();
    assert_eq!(found, expected.iter().copied().collect(), "{broken:#?}");
}

/// Looks on while it lives.
pub(crate) struct Watch(tokio::task::JoinHandle<()>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A key that is looked at meanwhile.
struct Busy(History, String);

impl Drop for Busy {
    fn drop(&mut self) {
        let mut inner = self.0.inner();
        if let Some(clients) = inner.busy.get_mut(&self.1) {
            *clients -= 1;
            if *clients == 0 {
                inner.busy.remove(&self.1);
            }
        }
    }
}

/// Where the record of a key is.
pub(crate) fn storage_key(key: &str) -> StorageKey {
    let identity = Identity::of_parts(["acme"]);
    StorageKey::new(&identity, &IdempotencyKey::new(key).expect("a key"))
}

/// The record of a key, if it has one.
pub(crate) async fn record(store: &dyn Inspect, key: &str) -> Option<Record> {
    store.look(storage_key(key)).await.expect("the store answers").record().cloned()
}

/// What the store holds under a key; none if it does not answer.
async fn held(store: &dyn Inspect, key: &str) -> Option<Held> {
    let key = storage_key(key);
    let looked = tokio::time::timeout(Duration::from_secs(5), store.look(key)).await;
    let record = match looked.ok()?.ok()?.current {
        Current::Absent => return Some(Held { attempt: 0, fence: 0, state: State::Absent }),
        Current::Unreadable(_) => {
            return Some(Held { attempt: 0, fence: 0, state: State::Unreadable });
        }
        Current::Present(record) => record,
    };
    let state = match record.state {
        Recorded::InFlight { until, .. } => State::InFlight { until: until.0 },
        Recorded::Open { .. } => State::Open,
        Recorded::Indeterminate { .. } => State::Indeterminate,
        Recorded::Completed { response, .. } => {
            let response = StoredResponse::decode(response).expect("a stored response");
            let body = match response.body() {
                StoredBody::Kept(body) => Some(body.clone()),
                StoredBody::NotKept => None,
                other => panic!("{other:?} is no kind of body that this knows"),
            };
            State::Completed { status: response.status().as_u16(), body }
        }
    };
    Some(Held { attempt: record.attempt.number(), fence: record.fence.number(), state })
}

/// Reads the lines `TIME DEBUG payments::runs: WHAT key_id=… attempt=… fence=…`, and of which request; of whatever program.
pub(crate) fn runs_in(log: &str) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for line in log.lines() {
        let Some((head, said)) = line.split_once("::runs: ") else { continue };
        let field = |name: &str| {
            let mut words = said.split(' ').filter_map(|word| word.split_once('='));
            words.find(|(found, _)| *found == name).map(|(_, value)| value.to_owned())
        };
        let number = |name| field(name).and_then(|text| text.parse().ok()).expect(line);
        let (key_id, fence) = (field("key_id").expect(line), number("fence"));
        let attempt = u32::try_from(number("attempt")).expect(line);
        let at = micros(head.split(' ').next().expect("a time")).expect(line);
        let finish = match said.split(" key_id=").next().expect("words") {
            "begins" => {
                let request = (number("amount"), field("source").expect(line));
                runs.push(Run { key_id, attempt, fence, request, began: at, ended: None });
                continue;
            }
            "has charged" => continue,
            "answers" => Finish::Answers,
            "did nothing" => Finish::DidNothing,
            "is cut off" => Finish::CutOff,
            other => panic!("{other:?} is not what handlers do: {line}"),
        };
        let mut begun = runs.iter_mut().rev();
        let begun = begun.find(|run| run.fence == fence && run.key_id == key_id).expect(line);
        begun.ended = Some((at, finish));
    }
    runs
}

/// Microseconds since 1970 of a time like `2026-11-29T23:13:53.123456Z`.
fn micros(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.split('-').map(|part| part.parse::<u64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let (time, fraction) = time.split_once('.')?;
    let mut time = time.split(':').map(|part| part.parse::<u64>().ok());
    let seconds = time.next()?? * 3600 + time.next()?? * 60 + time.next()??;
    // The year begins in March: so the day of a leap year is its last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1;
    let micros = format!("{fraction:0<6}").get(..6)?.parse::<u64>().ok()?;
    Some(((days - 719_468) * 86_400 + seconds) * 1_000_000 + micros)
}

/// A history that is read wrongly shows nothing.
mod tests {
    use super::*;

    #[test]
    fn what_a_process_says_of_its_handlers_is_read_as_it_is_written() {
        let log = "2000-03-01T00:00:01.5Z DEBUG payments::runs: begins key_id=ab attempt=1 fence=7 amount=5 source=t\n\
                   2000-03-01T00:00:01.600000Z  WARN other: key_id=ab\n\
                   2000-03-01T00:00:02.000001Z DEBUG payments::runs: did nothing key_id=ab attempt=1 fence=7\n\
                   2026-11-29T23:13:53.000000Z DEBUG payments::runs: begins key_id=ab attempt=2 fence=9 amount=6 source=t\n";
        let runs = runs_in(log);
        let seen: Vec<_> =
            runs.iter().map(|run| (run.attempt, run.request.0, run.began, run.ended)).collect();
        // `date -u -d 2000-03-01 +%s` and `date -u -d 2026-11-29T23:13:53 +%s`.
        let (march, november) = (951_868_800_000_000, 1_795_994_033_000_000);
        let end = (march + 2_000_001, Finish::DidNothing);
        assert_eq!(
            seen,
            [(1, 5, march + 1_500_000, Some(end)), (2, 6, november, None)],
            "{runs:?}"
        );
    }

    #[test]
    fn what_a_fault_breaks_by_nature_is_told_apart_from_the_rest() {
        let broken = ["I3", "I4"].map(|invariant| Broken { invariant, what: String::new() });
        let refused = |check: &dyn Fn()| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_err()
        };
        assert_holds(&[]);
        assert_breaks(&broken, &["I4", "I3"]);
        assert!(refused(&|| assert_holds(&broken)));
        assert!(refused(&|| assert_breaks(&broken, &["I4"])), "more than expected");
        assert!(refused(&|| assert_breaks(&broken[..1], &["I3", "I4"])), "less than expected");
    }
}
