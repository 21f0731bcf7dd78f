//! Looking where the primary is between connections.
//!
//! A server that Sentinels have given up may go on serving whoever is connected to it: they tell it so when they get
//! to it, which takes ten seconds and more, and never if they cannot. What it is told until then is lost. So they
//! are asked all the time, each by itself, and its connections are left as soon as one of them knows of a later decision.

use std::sync::{Arc, Weak};
use std::time::Duration;

use ::redis::RedisError;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep};

use super::Dialer;
use super::sentinel::Watcher;
use super::votes::{Named, Votes};

/// How often each of them is asked: two small questions, and no more of a failover is lost than this.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long an answer may take: far beyond what a healthy Sentinel takes.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// So long what one said counts as what it says: it is asked anew before that, unless it hangs.
const FRESH_FOR: Duration = Duration::from_secs(2);

/// What most Sentinels say that is earlier than what was known is believed when they have kept to it for so long. They
/// hear of each other's decisions within two seconds; after that the one with the higher number has gone, as when
/// all of them are set up anew.
const EARLIER_FOR: Duration = Duration::from_secs(5);

/// A failover would be missed while most do not answer. That is said after this, which a restart of them may take.
const BLIND_FOR: Duration = Duration::from_secs(5);

/// Looks as long as somebody has this dialer, unless that is done already.
pub(super) fn begin(dialer: &Arc<Dialer>, watchers: impl FnOnce() -> Vec<Watcher>) {
    if dialer.begins_to_follow() {
        let (watchers, following) = (watchers(), Following(Arc::downgrade(dialer)));
        // Nobody joins it: it ends with its dialer or with the runtime, and then the next connection begins it anew.
        tokio::spawn(follow(following, watchers));
    }
}

struct Following(Weak<Dialer>);

impl Drop for Following {
    fn drop(&mut self) {
        if let Some(dialer) = self.0.upgrade() {
            dialer.follows_no_more();
        }
    }
}

async fn follow(following: Following, watchers: Vec<Watcher>) {
    let mut sight = Sight::of(watchers.len());
    let ask = async |index: usize, mut watcher: Watcher| {
        sleep(LOOK_EVERY).await;
        let said = watcher.ask(ANSWER_WITHIN).await;
        (index, watcher, said)
    };
    let mut asked: FuturesUnordered<_> =
        watchers.into_iter().enumerate().map(|(index, watcher)| ask(index, watcher)).collect();
    while let Some((index, watcher, said)) = asked.next().await {
        // Held for no longer than this takes.
        let Some(dialer) = following.0.upgrade() else { return };
        sight.sees(index, said, Instant::now());
        match sight.notices(Instant::now()) {
            Some(Notice::Blind) => {
                let reason = sight.failure.as_ref().map(ToString::to_string);
                tracing::warn!(
                    reason,
                    "most Sentinels do not answer: a failover is noticed when the connection to Redis breaks, and \
                     what the old primary is told until then may be lost"
                );
            }
            Some(Notice::SeesAgain) => {
                tracing::info!("most Sentinels answer again: failovers are followed");
            }
            None => {}
        }
        dialer.hears(|known| sight.judge(known, Instant::now()));
        drop(dialer);
        asked.push(ask(index, watcher));
    }
}

/// Whether a failover would be seen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Notice {
    Blind,
    SeesAgain,
}

/// What was seen last.
struct Sight {
    said: Vec<Option<(Named, Instant)>>,
    failure: Option<RedisError>,
    earlier: Option<(Named, Instant)>,
    /// Since when most do not answer, and whether that was said.
    blind: Option<(Instant, bool)>,
}

impl Sight {
    fn of(listed: usize) -> Self {
        Self { said: vec![None; listed], failure: None, earlier: None, blind: None }
    }

    fn sees(&mut self, index: usize, said: Result<Option<Named>, RedisError>, now: Instant) {
        self.said[index] = match said {
            Ok(named) => named.map(|named| (named, now)),
            Err(error) => {
                self.failure = Some(error);
                None
            }
        };
    }

    /// What to tell of how many answer, once each time that it changes.
    fn notices(&mut self, now: Instant) -> Option<Notice> {
        let fresh = |said: &&Option<(Named, Instant)>| {
            said.as_ref().is_some_and(|(_, at)| now.duration_since(*at) < FRESH_FOR)
        };
        if self.said.iter().filter(fresh).count() * 2 > self.said.len() {
            let told = self.blind.take().is_some_and(|(_, told)| told);
            return told.then_some(Notice::SeesAgain);
        }
        let (since, told) = self.blind.get_or_insert((now, false));
        if *told || now.duration_since(*since) < BLIND_FOR {
            return None;
        }
        *told = true;
        Some(Notice::Blind)
    }

    /// What to believe instead of what is known.
    fn judge(&mut self, known: &Named, now: Instant) -> Option<Named> {
        let mut votes = Votes::of(self.said.len());
        let fresh = |said: &Option<(Named, Instant)>| {
            let (named, at) = said.as_ref()?;
            (now.duration_since(*at) < FRESH_FOR).then(|| named.clone())
        };
        self.said.iter().filter_map(fresh).for_each(|named| votes.add(named));
        let earlier = votes.earlier(known);
        self.earlier = earlier.map(|earlier| match self.earlier.take() {
            Some((before, since)) if before.place == earlier.place => (earlier, since),
            Some(_) | None => (earlier, now),
        });
        votes.at_once(known).or_else(|| {
            let (earlier, since) = self.earlier.as_ref()?;
            (now.duration_since(*since) >= EARLIER_FOR).then(|| earlier.clone())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(port: u16, epoch: u64) -> Named {
        Named { place: ("host".to_owned(), port), epoch: Some(epoch) }
    }

    fn after(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[tokio::test(start_paused = true)]
    async fn what_most_keep_to_is_believed_in_the_end_and_one_that_hangs_delays_nothing() {
        let (start, known) = (Instant::now(), named(1, 9));
        let mut sight = Sight::of(3);
        for step in 0..=10 {
            let now = start + after(500 * step);
            // The third one hangs.
            sight.sees(0, Ok(Some(named(2, 0))), now);
            sight.sees(1, Ok(Some(named(2, 0))), now);
            let believed = sight.judge(&known, now);
            assert_eq!(believed, (step == 10).then(|| named(2, 0)), "step {step}");
        }
        // A later one at once.
        let now = start + after(6_000);
        sight.sees(2, Ok(Some(named(3, 10))), now);
        assert_eq!(sight.judge(&known, now), Some(named(3, 10)));
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_told_once_that_most_do_not_answer_and_once_that_they_do_again() {
        let start = Instant::now();
        let mut sight = Sight::of(3);
        let mut told = Vec::new();
        for step in 0..40 {
            let now = start + after(500 * step);
            let all = (10..30).contains(&step);
            for index in 0..3 {
                // One of three is too few.
                let well = !all || index == 0;
                let failed = || Err(RedisError::from((::redis::ErrorKind::Io, "gone")));
                sight.sees(index, if well { Ok(Some(named(1, 1))) } else { failed() }, now);
            }
            told.extend(sight.notices(now).map(|notice| (step, notice)));
        }
        assert_eq!(told, [(20, Notice::Blind), (30, Notice::SeesAgain)]);
        assert!(sight.failure.is_some(), "and why");
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_said_long_ago_counts_no_more() {
        let (start, known) = (Instant::now(), named(1, 9));
        let mut sight = Sight::of(3);
        sight.sees(0, Ok(Some(named(2, 10))), start);
        assert_eq!(sight.judge(&known, start + after(1_900)), Some(named(2, 10)));
        assert_eq!(sight.judge(&known, start + after(2_100)), None);
    }
}
