//! Looking where the primary is between connections.
//!
//! A server that Sentinels have given up may go on serving whoever is connected to it: they tell it so when they get
//! to it, which takes ten seconds and more, and never if they cannot. What it is told until then is lost. So they
//! are asked all the time, each by itself, and its connections are left as soon as one of them knows of a later decision.

use std::sync::{Arc, Weak};
use std::time::Duration;

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

/// A failover would be missed while most name no primary. That is said after this, which a restart of them may take.
const BLIND_FOR: Duration = Duration::from_secs(5);

/// News of a decision reach all of them within two seconds. One that contradicts most of them for so long is told.
const ODD_FOR: Duration = Duration::from_secs(5);

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
    let places: Vec<_> = watchers.iter().map(Watcher::place).collect();
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
                tracing::warn!(
                    reason = sight.reasons(),
                    "most Sentinels do not say where the primary is: a failover is noticed when the connection to \
                     Redis breaks, and what the old primary is told until then may be lost"
                );
            }
            Some(Notice::SeesAgain) => {
                tracing::info!("most Sentinels name the primary again: failovers are followed");
            }
            None => {}
        }
        for Odd { index, named, most } in sight.contradictions(Instant::now()) {
            let shown = |named: &Named| format!("{}:{}", named.place.0, named.place.1);
            tracing::warn!(
                sentinel = &*places[index],
                names = shown(&named),
                epoch = named.epoch,
                most_name = shown(&most),
                most_epoch = most.epoch,
                "a Sentinel contradicts most of the others: if its epoch is the higher one, it is believed, and a \
                 failover by the others is followed only after five seconds; let it learn from them, with SENTINEL \
                 REMOVE and SENTINEL MONITOR"
            );
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

/// One that contradicts most of them.
#[derive(Debug, Eq, PartialEq)]
struct Odd {
    index: usize,
    named: Named,
    most: Named,
}

/// What was seen last.
struct Sight {
    of_each: Vec<Seen>,
    earlier: Option<(Named, Instant)>,
    /// Since when most name no primary, and whether that was said.
    blind: Option<(Instant, bool)>,
}

/// What one of them said last.
#[derive(Clone, Default)]
struct Seen {
    named: Option<(Named, Instant)>,
    /// Why it named nothing.
    reason: Option<String>,
    /// Since when it contradicts most of them, and whether that was said.
    odd: Option<(Instant, bool)>,
}

impl Seen {
    fn fresh(&self, now: Instant) -> Option<&Named> {
        let (named, at) = self.named.as_ref()?;
        (now.duration_since(*at) < FRESH_FOR).then_some(named)
    }
}

impl Sight {
    fn of(listed: usize) -> Self {
        Self { of_each: vec![Seen::default(); listed], earlier: None, blind: None }
    }

    fn sees(&mut self, index: usize, said: Result<Named, String>, now: Instant) {
        let seen = &mut self.of_each[index];
        (seen.named, seen.reason) = match said {
            Ok(named) => (Some((named, now)), None),
            Err(reason) => (None, Some(reason)),
        };
    }

    /// Why those who name no primary now do not.
    fn reasons(&self) -> Option<String> {
        let reasons: Vec<&str> =
            self.of_each.iter().filter_map(|seen| seen.reason.as_deref()).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }

    fn votes(&self, now: Instant) -> Votes {
        let mut votes = Votes::of(self.of_each.len());
        let fresh = self.of_each.iter().filter_map(|seen| seen.fresh(now));
        fresh.for_each(|named| votes.add(named.clone()));
        votes
    }

    /// What to tell of how many name a primary, once each time that it changes.
    fn notices(&mut self, now: Instant) -> Option<Notice> {
        let naming = self.of_each.iter().filter(|seen| seen.fresh(now).is_some()).count();
        if naming * 2 > self.of_each.len() {
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

    /// Who contradicts most of them, once each until it has agreed.
    fn contradictions(&mut self, now: Instant) -> Vec<Odd> {
        let votes = self.votes(now);
        let most_agree = votes.majority().is_some();
        let of_one = |(index, seen): (usize, &mut Seen)| {
            let named = seen.fresh(now).cloned();
            let Some(most) = named.as_ref().and_then(|named| votes.against(named)) else {
                // One that is silent, or has nobody to agree with, has not agreed.
                let agrees = named.is_some() && most_agree;
                seen.odd = seen.odd.filter(|&(_, told)| told && !agrees);
                return None;
            };
            let (since, told) = seen.odd.get_or_insert((now, false));
            if *told || now.duration_since(*since) < ODD_FOR {
                return None;
            }
            *told = true;
            Some(Odd { index, named: named?, most })
        };
        self.of_each.iter_mut().enumerate().filter_map(of_one).collect()
    }

    /// What to believe instead of what is known.
    fn judge(&mut self, known: &Named, now: Instant) -> Option<Named> {
        let votes = self.votes(now);
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
            sight.sees(0, Ok(named(2, 0)), now);
            sight.sees(1, Ok(named(2, 0)), now);
            let believed = sight.judge(&known, now);
            assert_eq!(believed, (step == 10).then(|| named(2, 0)), "step {step}");
        }
        // A later one at once.
        let now = start + after(6_000);
        sight.sees(2, Ok(named(3, 10)), now);
        assert_eq!(sight.judge(&known, now), Some(named(3, 10)));
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_told_once_that_most_name_no_primary_and_once_that_they_do_again() {
        let start = Instant::now();
        let mut sight = Sight::of(3);
        let mut told = Vec::new();
        for step in 0..40 {
            let now = start + after(500 * step);
            let all = (10..30).contains(&step);
            for index in 0..3 {
                // One of three is too few.
                let well = !all || index == 0;
                sight.sees(index, well.then(|| named(1, 1)).ok_or_else(|| "gone".to_owned()), now);
            }
            told.extend(sight.notices(now).map(|notice| (step, notice)));
        }
        assert_eq!(told, [(20, Notice::Blind), (30, Notice::SeesAgain)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reason_is_that_of_one_that_names_nothing_now() {
        let now = Instant::now();
        let mut sight = Sight::of(3);
        assert_eq!(sight.reasons(), None);
        let because = |reason: &str| Err(reason.to_owned());
        sight.sees(0, because("one was paused"), now);
        sight.sees(1, because("two is gone"), now);
        sight.sees(2, Ok(named(1, 1)), now);
        assert_eq!(sight.reasons().as_deref(), Some("one was paused; two is gone"));
        sight.sees(0, Ok(named(1, 1)), now);
        assert_eq!(sight.reasons().as_deref(), Some("two is gone"), "the first has answered since");
        sight.sees(1, because("two watches no such master"), now);
        assert_eq!(sight.reasons().as_deref(), Some("two watches no such master"));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_contradicts_most_of_them_is_told_once_until_it_has_agreed() {
        let start = Instant::now();
        let mut sight = Sight::of(3);
        let (most, higher, elsewhere) = (named(1, 4), named(1, 99), named(2, 0));
        // What the second one says from a step on; the others say the same all the time, but for a while of silence.
        let says = [
            (0, Some(&most)),
            // A failover, of which the others hear within two seconds.
            (10, Some(&higher)),
            (14, Some(&most)),
            (20, Some(&higher)),
            (40, None),
            (50, Some(&higher)),
            (70, Some(&most)),
            (80, Some(&elsewhere)),
            // It contradicts them all the time, and says too little to be told.
            (100, Some(&most)),
            (101, Some(&higher)),
            (106, None),
            (115, Some(&higher)),
            (120, None),
        ];
        let mut told = Vec::new();
        for step in 0..140 {
            let now = start + after(500 * step);
            let (_, of_it) = says.iter().rfind(|(from, _)| *from <= step).unwrap();
            let of_others = (!(55..60).contains(&step)).then_some(&most);
            for (index, said) in [of_others, *of_it, of_others].into_iter().enumerate() {
                sight.sees(index, said.cloned().ok_or_else(|| "gone".to_owned()), now);
            }
            told.extend(sight.contradictions(now).into_iter().map(|odd| (step, odd)));
        }
        let odd = |named: &Named| Odd { index: 1, named: named.clone(), most: most.clone() };
        assert_eq!(told, [(30, odd(&higher)), (90, odd(&elsewhere))]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_said_long_ago_counts_no_more() {
        let (start, known) = (Instant::now(), named(1, 9));
        let mut sight = Sight::of(3);
        sight.sees(0, Ok(named(2, 10)), start);
        assert_eq!(sight.judge(&known, start + after(1_900)), Some(named(2, 10)));
        assert_eq!(sight.judge(&known, start + after(2_100)), None);
    }
}
