#!lua flags=allow-oom
--[[ Stores a large response that waits under a key beside the record, and ends the lease.
     One script, because only the last holder may write, and only while nobody has taken over.
     The response never passes through Lua, which would copy it twice: its key is renamed.
     It may exceed maxmemory: the effect has happened, and losing its answer helps nobody.

  KEYS[1]  record     (string; the layout stands in src/record/codec.rs)
  KEYS[2]  beside     (string: the record as it shall be: the head, then the response)
  ARGV[1]  head       (84 bytes, of the record as it shall be)
  ARGV[2]  retention  (milliseconds)
  ARGV[3]  accepted   (up to 3 times 36 bytes: recipe id and digest by older recipes; left out if none)
  Returns  1 stored
         | 2 healed
         | 3 restored
         | 4 superseded, response
         | 5 mismatch
         | 6 lost
         | 7 unreadable
         | 8 nothing beside
]]
local key, beside = KEYS[1], KEYS[2]
local head, retention = ARGV[1], ARGV[2]

local sub = string.sub
if redis.call('STRLEN', beside) < 85 then return {8} end
local record = redis.call('GETRANGE', key, '0', '83')
local length = redis.call('STRLEN', key)
local version, state = string.byte(record, 1, 2)
-- The first claim of a key as it was granted: nobody has renewed it, noted anything, or taken it over.
if version == 1 and length == 84 and (state == 6 or state == 7)
  and sub(record, 3, 64) == sub(head, 3, 64) then
  -- The key brings its expiry along, which was short.
  redis.call('PEXPIRE', beside, retention)
  redis.call('RENAME', beside, key)
  return {1}
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- A string with nothing in it is no record, but it is there.
local absent = record == '' and redis.call('EXISTS', key) == 0
local noted
if not absent then
  local known = version == 1 and length >= 84
  if known then
    -- The first claim of a key leaves its times to the key's expiry. Here they are written out.
    if state == 6 or state == 7 then
      local till = redis.call('PEXPIRETIME', key) - struct.unpack('>I6', record, 71)
      if till > 0 then
        local made = math.max(till - struct.unpack('>I4', record, 77), 0)
        local fence = struct.unpack('>I6', record, 59)
        if fence + 1000 < made then fence = made end
        state = state == 6 and 1 or 5
        record = '\1' .. string.char(state) .. sub(record, 3, 58)
          .. struct.pack('>I6I6I6', fence, made, till) .. sub(record, 77)
      end
    end
    known = state >= 1 and state <= 5
  end
  if known then
    local granted
    granted, noted = struct.unpack('>I4I4', record, 77)
    known = length - 84 - noted == (state == 4 and math.max(granted, 1) or 0)
  end
  if not known then
    redis.call('UNLINK', beside)
    return {7}
  end

  local mine = sub(record, 39, 54) == sub(head, 39, 54)
  if state == 4 then
    local first, same, recipe = 84 + noted, false, sub(record, 3, 6)
    local prints = sub(head, 3, 38) .. (ARGV[3] or '')
    for i = 1, #prints, 36 do
      if sub(prints, i, i + 3) == recipe then
        same = sub(prints, i + 4, i + 35) == sub(record, 7, 38)
        break
      end
    end
    local stored = (mine or same) and redis.call('GETRANGE', key, first, -1)
    local again = mine and stored == redis.call('GETRANGE', beside, '84', '-1')
    redis.call('UNLINK', beside)
    if again then
      -- Written again: a WAIT that follows waits for writes of its own connection only.
      redis.call('SETRANGE', key, '0', '\1')
      return {1}
    end
    if mine then return {6} end
    if same then return {4, stored} end
    return {5}
  end
  if not mine or state == 2 then
    redis.call('UNLINK', beside)
    return {6}
  end
end

-- The record is replaced by the last command: one that fails before leaves the record as it was.
local kept = absent and sub(head, 3, 70) or sub(record, 3, 70)
redis.call('SETRANGE', beside, '0', '\1\4' .. kept .. struct.pack('>I6', now))
redis.call('PEXPIRE', beside, retention)
redis.call('RENAME', beside, key)
if absent then return {3} end
if state == 3 then return {2} end
return {1}
