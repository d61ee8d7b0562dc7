// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Making and checking the zone's header page.
//!
//! [`Header::check`] is a pure function of a *copy* of the page; the rest of the crate relies on what it has checked.

use std::mem::{offset_of, size_of};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::format::{self, TMB_MAX_AREAS, TMB_PAGE, TMB_ZONE_ALIGN, tmb_area, tmb_zone_header};
use crate::member::{name_from, name_to};
use crate::{Error, Result};

/// Bytes of the header page.
pub const HEADER_SIZE: usize = size_of::<tmb_zone_header>();
/// Incompatible features that this crate knows: none yet.
const KNOWN_INCOMPAT: u64 = 0;
/// Features that a writer must know: none yet.
const KNOWN_RO_COMPAT: u64 = 0;
const PAGE: u64 = TMB_PAGE as u64;
const ALIGN: u64 = TMB_ZONE_ALIGN as u64;
/// Bytes of the SYNC area unless configured otherwise.
pub const DEFAULT_SYNC_SIZE: u64 = 1 << 20;

/// The service that an area belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AreaType {
    /// A file system.
    Files,
    /// Named semaphores, mutexes and counters.
    Sync,
    /// Rings and windows of one client of calls.
    Calls,
    /// A type that this version doesn't know: left alone.
    #[serde(untagged)]
    Other(u32),
}

impl AreaType {
    pub(crate) fn raw(self) -> u32 {
        match self {
            AreaType::Files => format::TMB_AREA_FILES,
            AreaType::Sync => format::TMB_AREA_SYNC,
            AreaType::Calls => format::TMB_AREA_CALLS,
            AreaType::Other(raw) => raw,
        }
    }

    fn from_raw(raw: u32) -> AreaType {
        match raw {
            format::TMB_AREA_FILES => AreaType::Files,
            format::TMB_AREA_SYNC => AreaType::Sync,
            format::TMB_AREA_CALLS => AreaType::Calls,
            other => AreaType::Other(other),
        }
    }
}

impl std::fmt::Display for AreaType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            AreaType::Files => f.write_str("files"),
            AreaType::Sync => f.write_str("sync"),
            AreaType::Calls => f.write_str("calls"),
            AreaType::Other(raw) => write!(f, "type-{raw}"),
        }
    }
}

/// An area to be made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaConfig {
    /// The service that will use the area.
    pub kind: AreaType,
    /// Name, unique among areas of its type.
    pub name: String,
    /// Bytes, a multiple of 4096; `None`: all remaining bytes (one area at most).
    pub size: Option<u64>,
}

/// An area of a zone: checked to lie inside of it and to overlap no other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Area {
    /// The service that uses the area.
    pub kind: AreaType,
    /// Unique among the areas of its type.
    pub name: String,
    /// Bytes from the zone's start, a multiple of 4096.
    pub offset: u64,
    /// Bytes, a multiple of 4096, not 0.
    pub len: u64,
}

/// A checked copy of a zone's header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The zone's name.
    pub name: String,
    /// Drawn at random when the zone was made; guests recognize their zones by it.
    pub uuid: Uuid,
    /// Bytes of the whole zone, its header and member table included; a multiple of 4096.
    pub size: u64,
    /// Unix time in ns.
    pub created_ns: u64,
    /// Its areas in the order of the table.
    pub areas: Vec<Area>,
    /// Changes when a host process takes the zone over.
    pub session: u64,
    /// False when the zone has features without knowledge of which it may only be read.
    pub may_write: bool,
}

impl Header {
    /// Checks a copy of the header page. `backing_size`: bytes of the memory it was read from; `zone`: for messages.
    pub fn check(page: &[u8; HEADER_SIZE], backing_size: u64, zone: &str) -> Result<Header> {
        let not = |why: String| Error::NotAZone { zone: zone.to_owned(), why };
        let unsupported = |why: String| Error::Unsupported { zone: zone.to_owned(), why };
        let damaged = |why: String| Error::Damaged { zone: zone.to_owned(), why };
        let magic = u64_at(page, offset_of!(tmb_zone_header, magic));
        if magic != format::TMB_ZONE_MAGIC {
            return Err(not(format!("magic is {magic:#018x}, not {:#018x}", format::TMB_ZONE_MAGIC)));
        }
        let version = u32_at(page, offset_of!(tmb_zone_header, version));
        if version != format::TMB_ZONE_VERSION {
            return Err(unsupported(format!(
                "format version {version}; this program knows version {}",
                format::TMB_ZONE_VERSION
            )));
        }
        let unknown = u64_at(page, offset_of!(tmb_zone_header, incompat)) & !KNOWN_INCOMPAT;
        if unknown != 0 {
            return Err(unsupported(format!("unknown incompatible features {unknown:#x}")));
        }
        let header_size = u32_at(page, offset_of!(tmb_zone_header, header_size));
        if header_size as usize != HEADER_SIZE {
            return Err(damaged(format!("header_size is {header_size}, not {HEADER_SIZE}")));
        }
        let size = u64_at(page, offset_of!(tmb_zone_header, size));
        if size < u64::from(format::TMB_ZONE_MIN) || size % ALIGN != 0 {
            return Err(damaged(format!(
                "size is {size}; it must be a multiple of {ALIGN} and at least {}",
                format::TMB_ZONE_MIN
            )));
        }
        if size > backing_size {
            return Err(damaged(format!("size is {size}, but only {backing_size} bytes are there")));
        }
        let members = u32_at(page, offset_of!(tmb_zone_header, n_members));
        let members_off = u64_at(page, offset_of!(tmb_zone_header, members_off));
        let member_size = u32_at(page, offset_of!(tmb_zone_header, member_size));
        if members != format::TMB_MAX_MEMBERS
            || members_off != format::MEMBERS_OFF
            || u64::from(member_size) != format::MEMBER_SIZE
        {
            return Err(damaged(format!(
                "member table is {members} slots of {member_size} bytes at {members_off}, not {} of {} at {}",
                format::TMB_MAX_MEMBERS,
                format::MEMBER_SIZE,
                format::MEMBERS_OFF
            )));
        }
        let n_areas = u32_at(page, offset_of!(tmb_zone_header, n_areas));
        if n_areas > TMB_MAX_AREAS {
            return Err(damaged(format!("n_areas is {n_areas}; the table has {TMB_MAX_AREAS}")));
        }
        let mut areas: Vec<Area> = Vec::new();
        for index in 0..n_areas as usize {
            let base = offset_of!(tmb_zone_header, areas) + index * size_of::<tmb_area>();
            let raw = u32_at(page, base + offset_of!(tmb_area, type_));
            if raw == format::TMB_AREA_NONE {
                continue;
            }
            let offset = u64_at(page, base + offset_of!(tmb_area, offset));
            let len = u64_at(page, base + offset_of!(tmb_area, length));
            let name_at = base + offset_of!(tmb_area, name);
            let name = name_from(&page[name_at..name_at + format::TMB_NAME_LEN as usize]);
            let kind = AreaType::from_raw(raw);
            if offset % PAGE != 0 || len % PAGE != 0 || len == 0 {
                return Err(damaged(format!(
                    "area {index} ({kind} {name:?}): offset {offset}, length {len}: not whole pages"
                )));
            }
            if offset < format::AREAS_START || offset.checked_add(len).is_none_or(|end| end > size) {
                return Err(damaged(format!(
                    "area {index} ({kind} {name:?}): {len} bytes at {offset} are not inside {}..{size}",
                    format::AREAS_START
                )));
            }
            let area = Area { kind, name, offset, len };
            if let Some(other) = areas.iter().find(|a| a.offset < offset + len && offset < a.offset + a.len) {
                return Err(damaged(format!(
                    "area {index} ({kind} {:?}) overlaps {} {:?}",
                    area.name, other.kind, other.name
                )));
            }
            if areas.iter().any(|a| a.kind == kind && a.name == area.name) {
                return Err(damaged(format!(
                    "area {index}: there are two {kind} areas named {:?}",
                    area.name
                )));
            }
            areas.push(area);
        }
        let mut uuid = [0; 16];
        let uuid_at = offset_of!(tmb_zone_header, uuid);
        uuid.copy_from_slice(&page[uuid_at..uuid_at + 16]);
        let name_at = offset_of!(tmb_zone_header, name);
        Ok(Header {
            name: name_from(&page[name_at..name_at + format::TMB_NAME_LEN as usize]),
            uuid: Uuid::from_bytes(uuid),
            size,
            created_ns: u64_at(page, offset_of!(tmb_zone_header, created_ns)),
            areas,
            session: u64_at(page, offset_of!(tmb_zone_header, session)),
            may_write: u64_at(page, offset_of!(tmb_zone_header, ro_compat)) & !KNOWN_RO_COMPAT == 0,
        })
    }

    /// Returns the page of this header, with magic: the inverse of [`Self::check`] for results of [`layout`].
    pub fn encode(&self) -> Result<[u8; HEADER_SIZE]> {
        let mut page = [0; HEADER_SIZE];
        put_u64(&mut page, offset_of!(tmb_zone_header, magic), format::TMB_ZONE_MAGIC);
        put_u32(&mut page, offset_of!(tmb_zone_header, version), format::TMB_ZONE_VERSION);
        put_u32(&mut page, offset_of!(tmb_zone_header, header_size), HEADER_SIZE as u32);
        put(&mut page, offset_of!(tmb_zone_header, uuid), self.uuid.as_bytes());
        put_u64(&mut page, offset_of!(tmb_zone_header, size), self.size);
        put(
            &mut page,
            offset_of!(tmb_zone_header, name),
            &name_to(&self.name, "the zone's name", &self.name)?,
        );
        put_u64(&mut page, offset_of!(tmb_zone_header, created_ns), self.created_ns);
        put_u32(&mut page, offset_of!(tmb_zone_header, n_areas), self.areas.len() as u32);
        put_u32(&mut page, offset_of!(tmb_zone_header, n_members), format::TMB_MAX_MEMBERS);
        put_u64(&mut page, offset_of!(tmb_zone_header, members_off), format::MEMBERS_OFF);
        put_u32(&mut page, offset_of!(tmb_zone_header, member_size), format::MEMBER_SIZE as u32);
        put_u64(&mut page, offset_of!(tmb_zone_header, session), self.session);
        for (index, area) in self.areas.iter().enumerate() {
            let base = offset_of!(tmb_zone_header, areas) + index * size_of::<tmb_area>();
            put_u32(&mut page, base + offset_of!(tmb_area, type_), area.kind.raw());
            put_u64(&mut page, base + offset_of!(tmb_area, offset), area.offset);
            put_u64(&mut page, base + offset_of!(tmb_area, length), area.len);
            put(&mut page, base + offset_of!(tmb_area, name), &name_to(&self.name, "area name", &area.name)?);
        }
        Ok(page)
    }
}

/// Returns the areas of a zone by default: SYNC of 1 MiB, FILES with the rest.
pub fn default_areas() -> Vec<AreaConfig> {
    vec![
        AreaConfig { kind: AreaType::Sync, name: "sync".to_owned(), size: Some(DEFAULT_SYNC_SIZE) },
        AreaConfig { kind: AreaType::Files, name: "files".to_owned(), size: None },
    ]
}

/// Places areas in a zone of `size` bytes: in order, the one without a size last; FILES areas and areas of 2 MiB and more
/// begin at multiples of 2 MiB.
pub fn layout(zone: &str, size: u64, configs: &[AreaConfig]) -> Result<Vec<Area>> {
    let bad = |why: String| Error::Config { zone: zone.to_owned(), why };
    if size < u64::from(format::TMB_ZONE_MIN) || size % ALIGN != 0 || i64::try_from(size).is_err() {
        return Err(bad(format!(
            "its size is {size}; it must be a multiple of 2 MiB and at least {} MiB",
            format::TMB_ZONE_MIN >> 20
        )));
    }
    if configs.len() > TMB_MAX_AREAS as usize {
        return Err(bad(format!("{} areas are too many (at most {TMB_MAX_AREAS})", configs.len())));
    }
    if configs.iter().filter(|c| c.size.is_none()).count() > 1 {
        return Err(bad("two areas want all that is left; give one of them a size".to_owned()));
    }
    let mut ordered: Vec<&AreaConfig> = configs.iter().collect();
    ordered.sort_by_key(|c| c.size.is_none());
    let mut next = format::AREAS_START;
    let mut areas: Vec<Area> = Vec::new();
    for config in ordered {
        name_to(zone, "area name", &config.name)?;
        if config.kind.raw() == format::TMB_AREA_NONE {
            return Err(bad(format!("area {:?} has type 0, which means none", config.name)));
        }
        if areas.iter().any(|a| a.kind == config.kind && a.name == config.name) {
            return Err(bad(format!("there are two {} areas named {:?}", config.kind, config.name)));
        }
        let aligned = config.kind == AreaType::Files || config.size.is_none_or(|s| s >= ALIGN);
        let offset = next.next_multiple_of(if aligned { ALIGN } else { PAGE });
        let left = size.saturating_sub(offset);
        let len = config.size.unwrap_or(left);
        if len == 0 || len % PAGE != 0 || len > left {
            return Err(bad(format!(
                "area {} {:?} of {len} bytes does not fit: {left} are left, and it must be a multiple of {PAGE} above 0",
                config.kind, config.name
            )));
        }
        next = offset + len;
        areas.push(Area { kind: config.kind, name: config.name.clone(), offset, len });
    }
    Ok(areas)
}

fn u64_at(page: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&page[at..at + 8]);
    u64::from_le_bytes(bytes)
}

fn u32_at(page: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&page[at..at + 4]);
    u32::from_le_bytes(bytes)
}

fn put(page: &mut [u8], at: usize, bytes: &[u8]) {
    page[at..at + bytes.len()].copy_from_slice(bytes);
}

fn put_u64(page: &mut [u8], at: usize, value: u64) {
    put(page, at, &value.to_le_bytes());
}

fn put_u32(page: &mut [u8], at: usize, value: u32) {
    put(page, at, &value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn header(size: u64, configs: &[AreaConfig]) -> Header {
        Header {
            name: "z".to_owned(),
            uuid: Uuid::from_u128(7),
            size,
            created_ns: 1,
            areas: layout("z", size, configs).unwrap(),
            session: 3,
            may_write: true,
        }
    }

    fn refusal(change: impl FnOnce(&mut [u8; HEADER_SIZE])) -> String {
        let mut page = header(64 * MIB, &default_areas()).encode().unwrap();
        change(&mut page);
        Header::check(&page, 64 * MIB, "/zone").unwrap_err().to_string()
    }

    #[test]
    fn the_default_zone_has_a_sync_area_and_an_aligned_file_area() {
        let areas = layout("z", 64 * MIB, &default_areas()).unwrap();
        assert_eq!((areas[0].kind, areas[0].len), (AreaType::Sync, MIB));
        assert_eq!((areas[1].kind, areas[1].offset, areas[1].len), (AreaType::Files, 2 * MIB, 62 * MIB));
    }

    #[test]
    fn each_wrong_field_is_named() {
        let area = |field: usize| offset_of!(tmb_zone_header, areas) + field;
        let second = |field: usize| area(field) + size_of::<tmb_area>();
        assert!(refusal(|p| p[0] ^= 1).contains("not a zone: magic"));
        assert!(refusal(|p| p[offset_of!(tmb_zone_header, version)] = 2).contains("format version 2"));
        assert!(
            refusal(|p| p[offset_of!(tmb_zone_header, incompat)] = 4).contains("incompatible features 0x4")
        );
        assert!(refusal(|p| p[offset_of!(tmb_zone_header, header_size)] = 1).contains("header_size"));
        assert!(
            refusal(|p| put_u64(p, offset_of!(tmb_zone_header, size), 128 * MIB))
                .contains("only 67108864 bytes")
        );
        assert!(refusal(|p| put_u64(p, offset_of!(tmb_zone_header, size), 9 * MIB)).contains("multiple of"));
        assert!(refusal(|p| put_u32(p, offset_of!(tmb_zone_header, n_members), 63)).contains("member table"));
        assert!(refusal(|p| put_u32(p, offset_of!(tmb_zone_header, n_areas), 33)).contains("n_areas is 33"));
        assert!(refusal(|p| put_u64(p, area(offset_of!(tmb_area, offset)), 4096)).contains("not inside"));
        assert!(
            refusal(|p| put_u64(p, area(offset_of!(tmb_area, offset)), u64::MAX - 4095))
                .contains("not inside")
        );
        assert!(refusal(|p| put_u64(p, area(offset_of!(tmb_area, length)), 100)).contains("not whole pages"));
        assert!(refusal(|p| put_u64(p, second(offset_of!(tmb_area, offset)), MIB)).contains("overlaps sync"));
    }

    #[test]
    fn features_that_only_writers_must_know_leave_reading_possible() {
        let mut page = header(64 * MIB, &default_areas()).encode().unwrap();
        put_u64(&mut page, offset_of!(tmb_zone_header, ro_compat), 1);
        put_u64(&mut page, offset_of!(tmb_zone_header, compat), u64::MAX);
        assert!(!Header::check(&page, 64 * MIB, "z").unwrap().may_write);
    }

    #[test]
    fn layouts_that_cannot_be_are_refused() {
        let area = |kind, name: &str, size| AreaConfig { kind, name: name.to_owned(), size };
        let refused = |size, configs: &[AreaConfig]| layout("z", size, configs).unwrap_err().to_string();
        assert!(refused(9 * MIB, &[]).contains("multiple of 2 MiB"));
        assert!(refused(6 * MIB, &[]).contains("at least 8 MiB"));
        assert!(refused(u64::MAX - (2 * MIB - 1), &[]).contains("multiple"));
        assert!(refused(8 * MIB, &[area(AreaType::Files, "a", Some(8 * MIB))]).contains("does not fit"));
        assert!(refused(8 * MIB, &[area(AreaType::Sync, "a", Some(100))]).contains("multiple of 4096"));
        let two = [area(AreaType::Files, "a", None), area(AreaType::Calls, "b", None)];
        assert!(refused(8 * MIB, &two).contains("two areas want"));
        let twins = [area(AreaType::Calls, "a", Some(4096)), area(AreaType::Calls, "a", Some(4096))];
        assert!(refused(8 * MIB, &twins).contains("two calls areas"));
        assert!(refused(8 * MIB, &[area(AreaType::Calls, "a/b", Some(4096))]).contains("without '/'"));
    }

    fn area_config() -> impl Strategy<Value = AreaConfig> {
        let kind = prop_oneof![
            Just(AreaType::Files),
            Just(AreaType::Sync),
            Just(AreaType::Calls),
            (4u32..).prop_map(AreaType::Other)
        ];
        (kind, "[a-z]{1,31}", proptest::option::of((1u64..2000).prop_map(|n| n * 4096)))
            .prop_map(|(kind, name, size)| AreaConfig { kind, name, size })
    }

    /// Asserts the properties that the rest of the crate relies on.
    fn assert_sound(header: &Header, backing: u64) {
        assert!(header.size <= backing && header.size >= 8 * MIB);
        for (i, a) in header.areas.iter().enumerate() {
            assert!(a.len > 0 && a.offset >= format::AREAS_START && a.offset + a.len <= header.size);
            assert!(a.offset % 4096 == 0 && a.len % 4096 == 0);
            for b in &header.areas[..i] {
                assert!(a.offset + a.len <= b.offset || b.offset + b.len <= a.offset);
            }
        }
    }

    proptest! {
        #[test]
        fn what_layout_makes_check_accepts(mib in 4u64..64, configs in proptest::collection::vec(area_config(), 0..34)) {
            if let Ok(areas) = layout("z", mib * 2 * MIB, &configs) {
                let made = Header { areas, ..header(mib * 2 * MIB, &[]) };
                let read = Header::check(&made.encode().unwrap(), mib * 2 * MIB, "z").unwrap();
                assert_sound(&read, mib * 2 * MIB);
                prop_assert_eq!(read, made);
            }
        }

        #[test]
        fn a_hostile_header_is_refused_or_sound(
            mib in 0u64..64,
            noise in proptest::collection::vec((0usize..512, prop_oneof![any::<u64>(), 0u64..70_000, (0u64..80).prop_map(|n| n << 20)]), 0..24),
        ) {
            let mut page = header(64 * MIB, &default_areas()).encode().unwrap();
            for (word, value) in noise {
                // Magic and version stay, so that the checks behind them are reached; their own refusals are tested
                // above.
                if word >= 2 { put_u64(&mut page, word * 8, value); }
            }
            if let Ok(header) = Header::check(&page, mib * 2 * MIB, "z") {
                assert_sound(&header, mib * 2 * MIB);
            }
        }

        #[test]
        fn noise_never_passes_for_a_zone(bytes in proptest::collection::vec(any::<u8>(), HEADER_SIZE)) {
            let page: [u8; HEADER_SIZE] = bytes.try_into().unwrap();
            prop_assert!(Header::check(&page, u64::MAX, "z").is_err());
        }
    }
}
