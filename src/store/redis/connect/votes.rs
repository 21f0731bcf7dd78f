//! What several Sentinels say, and what to make of it.
//!
//! Each decision of theirs has a number that grows, the configuration epoch, and most of them agreed to it. So a
//! later one is right, even if one alone tells it: the others hear of it within two seconds. Everything else is for
//! most of all that are listed to say, also of those that do not answer: one that was away may come back with the
//! place of a primary that was given up long ago, and that takes itself for one still.

/// Host and port, as the Sentinels say it.
pub(super) type Place = (String, u16);

/// What one of them says: where the primary is, by which of their decisions.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Named {
    pub(super) place: Place,
    /// None of one that does not tell: its user may not ask.
    pub(super) epoch: Option<u64>,
}

impl Named {
    /// This, by who knew that much before. The number never falls: when most have been set up anew, one that was not
    /// may come back with an old decision of a higher number than theirs.
    pub(super) fn after(self, before: &Self) -> Self {
        Self { epoch: self.epoch.max(before.epoch), ..self }
    }
}

/// Answers of different Sentinels.
#[derive(Debug)]
pub(super) struct Votes {
    all: Vec<Named>,
    /// How many could have answered.
    listed: usize,
}

impl Votes {
    pub(super) fn of(listed: usize) -> Self {
        Self { all: Vec::with_capacity(listed), listed }
    }

    pub(super) fn add(&mut self, named: Named) {
        self.all.push(named);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The place that most of all Sentinels name, by the latest decision that one of those tells.
    pub(super) fn majority(&self) -> Option<Named> {
        let popular = self.by_votes().into_iter().next()?;
        (self.of_place(&popular.place).count() * 2 > self.listed).then_some(popular)
    }

    /// What is to be believed at once by who knows this much already.
    pub(super) fn at_once(&self, known: &Named) -> Option<Named> {
        let told: Option<Vec<u64>> = self.all.iter().map(|named| named.epoch).collect();
        if let (Some(last), Some(before)) =
            (told.and_then(|told| told.into_iter().max()), known.epoch)
            && last > before
        {
            return self.all.iter().find(|named| named.epoch == Some(last)).cloned();
        }
        self.majority().filter(|named| {
            let earlier = named.epoch.zip(known.epoch).is_some_and(|(now, before)| now < before);
            !earlier
        })
    }

    /// What most say that is earlier than what was known: they may not have heard of it yet, or have been set up anew.
    pub(super) fn earlier(&self, known: &Named) -> Option<Named> {
        if self.at_once(known).is_some() {
            return None;
        }
        self.majority()
    }

    /// What most of all Sentinels tell otherwise than this one does: another place, or a lower number.
    pub(super) fn against(&self, named: &Named) -> Option<Named> {
        let most = self.majority()?;
        if most.place != named.place {
            return Some(most);
        }
        let lower = |other: &&Named| other.epoch.is_some() && other.epoch < named.epoch;
        let lower = self.all.iter().filter(lower);
        if lower.clone().count() * 2 <= self.listed {
            return None;
        }
        Some(Named { epoch: lower.map(|other| other.epoch).max().flatten(), ..most })
    }

    /// Where to look, by who knows nothing yet: the latest decision if all tell, or what most say, and then what few do.
    pub(super) fn places(&self) -> Vec<Named> {
        let mut places = self.by_votes();
        if self.all.iter().all(|named| named.epoch.is_some()) {
            let last = places.iter().map(|named| named.epoch).max().flatten();
            places.retain(|named| named.epoch == last);
        }
        places
    }

    /// Each place once, with the latest decision by which it is named; most votes first.
    fn by_votes(&self) -> Vec<Named> {
        let mut places: Vec<Named> = Vec::new();
        for named in &self.all {
            match places.iter_mut().find(|place| place.place == named.place) {
                Some(place) => place.epoch = place.epoch.max(named.epoch),
                None => places.push(named.clone()),
            }
        }
        places.sort_by_key(|place| std::cmp::Reverse(self.of_place(&place.place).count()));
        places
    }

    fn of_place(&self, place: &Place) -> impl Iterator<Item = &Named> {
        self.all.iter().filter(move |named| named.place == *place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(port: u16, epoch: impl Into<Option<u64>>) -> Named {
        Named { place: ("host".to_owned(), port), epoch: epoch.into() }
    }

    fn votes(listed: usize, all: &[(u16, Option<u64>)]) -> Votes {
        let all = all.iter().map(|&(port, epoch)| said(port, epoch)).collect();
        Votes { all, listed }
    }

    fn ports(places: &[Named]) -> Vec<u16> {
        places.iter().map(|named| named.place.1).collect()
    }

    #[test]
    fn a_later_decision_is_believed_at_once_though_one_alone_tells_it() {
        let told = votes(3, &[(1, Some(4)), (2, Some(5))]);
        assert_eq!(told.at_once(&said(1, 4)), Some(said(2, 5)));
        assert_eq!(ports(&told.places()), [2]);
    }

    #[test]
    fn one_that_was_away_moves_nobody_back() {
        // The others hang. They may not be asked for the number, or there never was a decision.
        assert_eq!(votes(3, &[(1, None)]).at_once(&said(2, None)), None);
        assert_eq!(votes(3, &[(1, Some(0))]).at_once(&said(2, 0)), None);
        assert_eq!(votes(3, &[(1, Some(4))]).at_once(&said(2, 5)), None);
        // It alone tells a number, of old.
        let mixed = votes(3, &[(1, Some(4)), (2, None), (2, None)]);
        assert_eq!(mixed.at_once(&said(2, None)), Some(said(2, None)));
        assert_eq!(ports(&mixed.places()), [2, 1]);
        // The others were set up anew with the same place.
        let anew = votes(3, &[(1, Some(8)), (2, Some(0)), (2, Some(0))]);
        assert_eq!(anew.at_once(&said(2, 9)), None);
        assert_eq!(anew.earlier(&said(2, 9)), Some(said(2, 0)));
    }

    #[test]
    fn most_are_against_who_names_another_place_or_a_higher_number() {
        let higher = votes(3, &[(1, Some(99)), (1, Some(3)), (1, Some(4))]);
        assert_eq!(higher.against(&said(1, 99)), Some(said(1, 4)));
        assert_eq!(higher.against(&said(1, 4)), None, "one is no majority");
        assert_eq!(higher.against(&said(1, 3)), None, "it has not heard yet");
        let elsewhere = votes(3, &[(2, Some(0)), (1, Some(4)), (1, Some(4))]);
        assert_eq!(elsewhere.against(&said(2, 0)), Some(said(1, 4)));
        assert_eq!(elsewhere.against(&said(1, 4)), None);
        // Of all that are listed, and not of those that answer.
        assert_eq!(votes(3, &[(1, Some(99)), (1, Some(3))]).against(&said(1, 99)), None);
        assert_eq!(votes(3, &[(2, None), (1, None)]).against(&said(2, None)), None);
        let untold = votes(3, &[(1, Some(99)), (1, None), (1, None)]);
        assert_eq!(untold.against(&said(1, 99)), None, "nobody knows theirs");
    }

    #[test]
    fn without_numbers_most_of_all_that_are_listed_decide() {
        let most = votes(3, &[(2, None), (1, None), (2, None)]);
        assert_eq!(most.at_once(&said(1, None)), Some(said(2, None)));
        assert_eq!(votes(4, &[(2, None), (2, None)]).at_once(&said(1, None)), None);
        assert_eq!(ports(&votes(3, &[(1, None), (2, None), (2, None)]).places()), [2, 1]);
        assert!(votes(3, &[]).places().is_empty());
    }

    #[test]
    fn what_most_say_that_is_earlier_takes_time() {
        let anew = votes(3, &[(1, Some(0)), (1, Some(0))]);
        assert_eq!(anew.at_once(&said(2, 9)), None);
        assert_eq!(anew.earlier(&said(2, 9)), Some(said(1, 0)));
        assert_eq!(votes(3, &[(1, Some(0))]).earlier(&said(2, 9)), None, "few are no reason");
        // And one with a decision from before that is not believed because of a higher number then.
        let known = said(1, 0).after(&said(2, 9));
        assert_eq!(votes(3, &[(3, Some(8)), (1, Some(0)), (1, Some(0))]).at_once(&known), None);
        assert_eq!(votes(3, &[(3, Some(8))]).at_once(&known), None);
    }
}
